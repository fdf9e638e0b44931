//! Suggestions for misspelt keys: the nearest path in the tree of known keys.

/// Maximum cost of a useful suggestion.
const MAX_COST: f64 = 0.6;
/// Cost of a component that only one of two paths has.
const MISSING_COMPONENT: f64 = 0.3;
/// Maximum cost of a name that is part of the other name.
const PART: f64 = 0.3;
/// Longest name that is compared.
const MAX_NAME: usize = 64;

/// The component of a known path that stands for any element of a list.
pub(super) const ANY: &str = "*";

/// Returns the known path nearest to the unknown path `found`, if any is near enough. An element of a list
/// is named as in `found`.
pub(super) fn nearest_path(found: &str, known: &[String]) -> Option<String> {
    let found: Vec<&str> = found.split('.').collect();
    let paths = known.iter().map(|path| path.split('.').collect::<Vec<_>>());
    let (_, path) = cheapest(paths.map(|path| (path_cost(&found, &path), path)))?;
    let named = path.iter().enumerate().map(|(index, &part)| match (part, found.get(index)) {
        (ANY, Some(&name)) if path.get(..index) == found.get(..index) => name,
        (ANY, _) => "NAME",
        (part, _) => part,
    });
    Some(named.collect::<Vec<_>>().join("."))
}

/// Returns the name most similar to `found`, if any is similar enough.
pub(super) fn nearest_name<'a>(
    found: &str,
    names: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    cheapest(names.into_iter().map(|name| (name_cost(found, name), name))).map(|(_, name)| name)
}

/// Returns the candidate with the smallest cost, or the first of equal candidates.
fn cheapest<T>(candidates: impl Iterator<Item = (f64, T)>) -> Option<(f64, T)> {
    let useful = candidates.filter(|(cost, _)| *cost <= MAX_COST);
    useful.min_by(|a, b| a.0.total_cmp(&b.0))
}

/// Returns the cost of two paths: the costs of their last components and of the tables around them.
fn path_cost(found: &[&str], known: &[&str]) -> f64 {
    match (found.split_last(), known.split_last()) {
        (Some((name, found)), Some((key, known))) => {
            name_cost(name, key) + tables_cost(found, known)
        }
        _ => f64::INFINITY,
    }
}

/// Returns the cost of the tables that only one of two paths has: the tables between their common first and last
/// tables.
fn tables_cost(found: &[&str], known: &[&str]) -> f64 {
    let same = |(found, known): &(&&str, &&str)| found == known || **known == ANY;
    let first = found.iter().zip(known).take_while(same).count();
    let (found, known) = (&found[first..], &known[first..]);
    let last = found.iter().rev().zip(known.iter().rev()).take_while(same).count();
    (found.len() + known.len() - 2 * last) as f64 * MISSING_COMPONENT
}

/// Returns the edits from one name to the other, as a fraction of the longer name's length.
fn name_cost(found: &str, known: &str) -> f64 {
    if found.len() > MAX_NAME {
        return f64::INFINITY;
    }
    let found = found.to_lowercase();
    let cost = 1.0 - strsim::normalized_damerau_levenshtein(&found, known);
    let part = found.len() > 2 && (known.contains(&found) || found.contains(known));
    if part { cost.min(PART) } else { cost }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Recipe;
    use crate::reader::known_keys;

    #[test]
    fn the_nearest_path_may_be_anywhere_in_the_tree() {
        let known = known_keys::<Recipe>().all;
        let nearest = |found| nearest_path(found, &known);
        for (found, expected) in [
            ("run.dri", "run.dir"),
            ("seed", "run.seed"),
            ("run.run.seed", "run.seed"),
            ("tokens", "stage.NAME.tokens"),
            ("checkpoints", "checkpoint"),
            ("checkpoint.kep", "checkpoint.keep"),
            ("log.steps", "log.every_steps"),
            ("data.seq_len", "data.sequence_length"),
            ("data.sources.0.pth", "data.sources.0.path"),
            ("stage.moh.shared_heads", "stage.moh.moh.shared_heads"),
            ("stage.moh.top_k", "stage.moh.moh.routed_top_k"),
            ("stage.tune.max", "stage.tune.learning_rate.max"),
            ("stage.tune.moh.tokens", "stage.tune.tokens"),
        ] {
            assert_eq!(nearest(found).as_deref(), Some(expected), "{found}");
        }
        for found in ["zzz", "run.xyz", "", &"x".repeat(1000)] {
            assert_eq!(nearest(found), None, "{found}");
        }
    }

    #[test]
    fn a_slip_in_a_short_name_is_near() {
        assert_eq!(nearest_name("mho", ["adapt", "moh"]), Some("moh"));
        assert_eq!(nearest_name("xyz", ["adapt", "moh"]), None);
    }
}
