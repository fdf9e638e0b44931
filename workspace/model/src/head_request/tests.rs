//! Tests of the head counts for users' requests.

use super::RouterKind::{Group, QueryNorm, Static};
use super::*;

fn counts(list: &[usize]) -> HeadCounts {
    list.iter().copied().collect()
}

fn share(share: f64) -> HeadRequest {
    HeadRequest { active: Some(Active::Share(share)), ..HeadRequest::default() }
}

/// Returns the shared heads and routed top-k of one layer.
fn resolved(request: &HeadRequest, heads: usize) -> Result<(usize, usize), String> {
    let moh = request.resolve(heads, heads, 1, None).map_err(|error| error.to_string())?;
    let layer = moh.layer(0);
    Ok((layer.shared.len(), layer.top_k))
}

#[test]
fn a_share_becomes_counts_by_one_rule() {
    for (heads, active, expected) in [
        (32, 1.0, (16, 16)),
        (32, 0.9, (16, 13)),
        (32, 0.75, (16, 8)),
        (32, 0.5, (8, 8)),
        (32, 0.3, (5, 5)),
        (8, 0.9, (4, 3)),
        (8, 0.75, (4, 2)),
        (8, 0.5, (2, 2)),
        (8, 0.3, (1, 1)),
        (8, 0.1, (0, 1)),
        (6, 0.75, (3, 2)),
        (5, 0.5, (1, 2)),
        (3, 0.75, (1, 1)),
        (2, 0.5, (0, 1)),
        // The product in f64 is 14.499999999999998.
        (50, 0.29, (7, 8)),
    ] {
        assert_eq!(resolved(&share(active), heads), Ok(expected), "{active} of {heads}");
    }
    for heads in 3..=64 {
        assert_eq!(resolved(&HeadRequest::default(), heads), resolved(&share(0.75), heads));
    }
}

#[test]
fn half_of_the_heads_or_of_the_active_ones_are_shared_for_every_number_of_heads() {
    for heads in 2..=96 {
        for percent in 1..=100 {
            let asked = f64::from(percent) / 100.0;
            let Ok((shared, top_k)) = resolved(&share(asked), heads) else { continue };
            let active = (heads * percent as usize * 2 + 100) / 200;
            assert_eq!(shared + top_k, active, "{asked} of {heads}");
            let half = if percent > 50 && active > heads / 2 && heads > 2 { heads } else { active };
            assert_eq!(shared, half / 2, "{asked} of {heads}");
            assert!(top_k > 0, "{asked} of {heads}");
            if percent <= 50 {
                assert!(top_k == shared || top_k == shared + 1, "{asked} of {heads}");
            }
        }
    }
    assert_eq!(resolved(&share(0.5), 15), Ok((4, 4)));
    assert_eq!(resolved(&share(0.5), 9), Ok((2, 3)));
}

#[test]
fn the_table_of_head_counts_is_the_rule() {
    const SHARES: [f64; 5] = [0.9, 0.75, 0.6, 0.5, 0.25];
    let mut table = "| heads |".to_owned();
    table.extend(SHARES.map(|share| format!(" {share} |")));
    table.push_str("\n|---|---|---|---|---|---|\n");
    for heads in [6, 8, 9, 12, 14, 15, 16, 24, 28, 32, 40, 64] {
        table.push_str(&format!("| {heads} |"));
        for active in SHARES {
            let (shared, top_k) = resolved(&share(active), heads).unwrap();
            table.push_str(&format!(" {shared} + {top_k} of {} |", heads - shared));
        }
        table.push('\n');
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/recipes.md");
    let document = std::fs::read_to_string(path).unwrap();
    assert!(document.contains(&format!("\n\n{table}\n")), "docs/recipes.md needs\n{table}");
}

#[test]
fn a_share_without_a_routed_model_is_refused() {
    let with = |shared: &[usize], active| HeadRequest {
        router: None,
        shared_heads: Some(counts(shared).into()),
        active: Some(Active::Share(active)),
    };
    for (request, heads, expected) in [
        (share(0.05), 8, "--active 0.05 of 8 heads leaves no head active"),
        (share(0.0), 8, "--active 0 of 8 heads leaves no head active"),
        (
            share(0.95),
            8,
            "--active 0.95 of 8 heads is all 8 heads: use a smaller share, or --active 1",
        ),
        (share(1.1), 8, "--active 1.1: must be a share of the heads, 0 to 1"),
        (share(f64::NAN), 8, "--active NaN: must be a share"),
        (share(1.0), 2, "shared_heads = 1 of 2 leaves one routed head"),
        (HeadRequest::default(), 2, "the default share of 0.75 of 2 heads is all 2 heads: set"),
        (
            with(&[4], 0.3),
            8,
            "--active 0.3 of 8 heads is 2, fewer than the 4 shared heads of layer 0: use a larger share or fewer --shared-heads",
        ),
        (
            with(&[4], 0.5),
            8,
            "--active 0.5 of 8 heads is 4, all of them shared heads of layer 0: use a larger share or fewer --shared-heads, or --routed-top-k 0",
        ),
        (with(&[8], 0.5), 8, "--active 0.5 of 8 heads is 4, fewer than the 8 shared"),
    ] {
        let message = resolved(&request, heads).unwrap_err();
        assert!(message.starts_with(expected), "{message}");
    }
}

#[test]
fn every_layer_meets_the_share() {
    let request = |active: Option<f64>| HeadRequest {
        router: None,
        shared_heads: Some(counts(&[6, 2, 4]).into()),
        active: active.map(Active::Share),
    };
    let found = request(Some(0.9)).resolve(8, 8, 3, None).unwrap();
    assert_eq!(found.routed_top_k, counts(&[1, 5, 3]));
    let message = request(Some(0.55)).resolve(8, 8, 3, None).unwrap_err().to_string();
    assert!(message.contains("is 4, fewer than the 6 shared heads of layer 0"), "{message}");
    let message = request(None).resolve(8, 8, 3, None).unwrap_err().to_string();
    assert!(message.starts_with("shared_heads of layer 0 = 6: the default share"), "{message}");
    let message = request(Some(0.9)).resolve(8, 8, 2, None).unwrap_err().to_string();
    assert!(message.starts_with("shared_heads has 3 entries"), "{message}");
    // A layer that shares all heads is dense, whatever the default.
    let dense =
        HeadRequest { shared_heads: Some(counts(&[8, 4]).into()), ..HeadRequest::default() };
    assert_eq!(dense.resolve(8, 8, 2, None).unwrap().routed_top_k, counts(&[0, 2]));
}

#[test]
fn a_routed_model_keeps_the_counts_that_are_left_out() {
    let source = MohConfig {
        router: QueryNorm,
        shared_heads: counts(&[2, 1]).into(),
        routed_top_k: 2.into(),
    };
    let resolve = |shared_heads: Option<usize>, active| {
        let shared_heads = shared_heads.map(SharedHeadSets::from);
        let found = HeadRequest { router: None, shared_heads, active }
            .resolve(8, 8, 2, Some(&source))
            .unwrap();
        (found.shared_heads, found.routed_top_k)
    };
    let top_k = || Some(Active::RoutedTopK(3.into()));
    assert_eq!(resolve(None, None), (counts(&[2, 1]).into(), 2.into()));
    assert_eq!(resolve(Some(5), None), (5.into(), 2.into()));
    assert_eq!(resolve(None, top_k()), (counts(&[2, 1]).into(), 3.into()));
    assert_eq!(resolve(None, Some(Active::Share(0.75))), (4.into(), 2.into()));
    let shared_heads = SharedHeadSets::from_ids(&[vec![1, 5], vec![7]]).unwrap();
    let source = MohConfig { shared_heads: shared_heads.clone(), ..source };
    let found = HeadRequest { active: top_k(), ..HeadRequest::default() };
    let found = found.resolve(8, 8, 2, Some(&source)).unwrap();
    assert_eq!((found.shared_heads, found.routed_top_k), (shared_heads, 3.into()));
}

#[test]
fn only_routed_top_k_0_leaves_the_routed_heads_inactive() {
    let request = |shared: usize| HeadRequest {
        router: None,
        shared_heads: Some(shared.into()),
        active: Some(Active::RoutedTopK(0.into())),
    };
    assert_eq!(resolved(&request(4), 8), Ok((4, 0)));
    let message = resolved(&request(0), 8).unwrap_err();
    assert!(message.contains("no head would be active"), "{message}");
}

#[test]
fn a_share_between_two_counts_says_what_it_became() {
    let rounding = |active, heads| share(active).rounding(heads, heads, None);
    let became = |text: &str| Some(text.to_string());
    assert_eq!(rounding(0.8, 8), became("--active 0.8 of 8 heads: 6 of 8, 0.75"));
    assert_eq!(rounding(0.55, 8), became("--active 0.55 of 8 heads: 4 of 8, 0.5"));
    assert_eq!([rounding(0.75, 8), rounding(1.0, 6), rounding(0.3, 10)], [None, None, None]);
    let default = HeadRequest::default().rounding(6, 6, None);
    assert_eq!(default, became("the default share of 0.75 of 6 heads: 5 of 6, 0.833"));
}

/// With 32 heads that read 8 key/value heads, or 8 heads that read 4.
#[test]
fn a_share_becomes_counts_that_a_router_can_route() {
    for (router, heads, kv_heads, active, expected) in [
        (Group, 32, 8, 0.75, (16, 8)),
        (Group, 32, 8, 0.5, (8, 8)),
        (Group, 32, 8, 0.7, (16, 8)),
        (Group, 8, 4, 0.75, (4, 2)),
        (Group, 8, 4, 0.5, (2, 2)),
        (Static, 32, 8, 0.75, (24, 0)),
        (Static, 8, 4, 0.55, (4, 0)),
    ] {
        let request = HeadRequest { router: Some(router), ..share(active) };
        let layer = request.resolve(heads, kv_heads, 2, None).unwrap().layer(1);
        let found = (layer.shared.len(), layer.top_k);
        assert_eq!(found, expected, "{router:?}, {active} of {heads}");
    }
    let group = HeadRequest { router: Some(Group), ..share(0.8) };
    let rounding = group.rounding(32, 8, None).unwrap();
    assert_eq!(rounding, "--active 0.8 of 32 heads: 24 of 32, 0.75");
    let all = HeadRequest { router: Some(Group), ..share(0.75) };
    let message = all.resolve(8, 2, 1, None).unwrap_err().to_string();
    assert!(message.contains("--active 0.75 of 8 heads is all 8 heads"), "{message}");
}

/// A routed model without its router keeps its shared heads.
#[test]
fn a_router_that_is_given_replaces_the_sources() {
    let source = MohConfig { router: QueryNorm, shared_heads: 4.into(), routed_top_k: 2.into() };
    let of = |router| HeadRequest { router: Some(router), ..HeadRequest::default() };
    let fixed = of(Static).resolve(8, 4, 1, Some(&source)).unwrap();
    let expected = MohConfig { router: Static, routed_top_k: 0.into(), ..source };
    assert_eq!(fixed, expected);
    let source = MohConfig { router: Group, routed_top_k: 2.into(), ..expected };
    assert_eq!(HeadRequest::default().resolve(8, 4, 1, Some(&source)).unwrap(), source);
}
