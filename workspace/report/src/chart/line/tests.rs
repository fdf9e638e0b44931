use super::*;

const SIZE: Size = Size { width: 600.0, height: 300.0, labels: true };

fn line(label: &str, points: Vec<(f64, f64)>, look: Look) -> Line {
    Line { label: label.to_owned(), points, look }
}

fn chart(lines: Vec<Line>) -> LineChart {
    LineChart { title: "Loss".into(), across: "tokens".into(), lines, ..LineChart::default() }
}

fn drawn(chart: &LineChart) -> String {
    chart.draw(SIZE).into_string()
}

/// Returns values that decrease slowly, except the first, which is far above.
fn falling() -> Vec<(f64, f64)> {
    let value = |x: f64| if x == 0.0 { 9.5 } else { 3.0 - x / 100.0 };
    (0..100).map(f64::from).map(|x| (x, value(x))).collect()
}

/// Returns the number after the first `start` in a drawing.
fn after(text: &str, start: &str) -> f64 {
    let rest = text.split(start).nth(1).unwrap();
    rest.split([' ', '"']).next().unwrap().parse().unwrap()
}

#[test]
fn a_chart_names_its_curves_and_marks() {
    let mut chart = chart(vec![
        line("training", vec![(1.0, 2.0), (2.0, 1.0)], Look::nth(0)),
        line("text & <code>", vec![(1.0, 2.0), (2.0, 1.1)], Look::nth(1)),
    ]);
    chart.marks = vec![Mark { at: 1.0, label: "moh".into() }];
    let svg = drawn(&chart);
    for expected in [">training<", ">text &amp; &lt;code&gt;<", ">moh<", "<title>Loss<", "line d1"]
    {
        assert!(svg.contains(expected), "{expected}: {svg}");
    }
    let file = chart.to_svg(SIZE);
    assert!(file.starts_with("<svg ") && file.contains("<style>") && file.ends_with("</svg>\n"));
}

#[test]
fn values_above_the_axis_are_cut_off_and_named() {
    let chart = chart(vec![line("training", falling(), Look::default())]);
    assert!(chart.values().is_below(4.0));
    let svg = drawn(&chart);
    assert!(svg.contains(">up to 9.500<"), "{svg}");
    // The line leaves the inner SVG, which cuts it off, instead of going along its edge.
    let path = svg.split("class=\"line d0\" d=\"M").nth(1).unwrap();
    let first: f64 = path.split(' ').nth(1).unwrap().parse().unwrap();
    assert!(first < -100.0, "{path}");
}

#[test]
fn the_last_label_of_the_axis_is_not_cut_off() {
    let small = Size { width: 400.0, height: 240.0, labels: false };
    for (log_across, first, last, label) in
        [(false, 0.0, 1.5e6, "1.5 M"), (true, 1024.0, 102.4e6, "100 M")]
    {
        let lines = vec![line("training", vec![(first, 1.0), (last, 2.0)], Look::default())];
        let svg = LineChart { log_across, ..chart(lines) }.draw(small).into_string();
        // The label ends at the edge, however wide it is.
        let (before, _) = svg.split_once(&format!("text-anchor=\"end\">{label}<")).unwrap();
        let place = after(before.rsplit("<text").next().unwrap(), " x=\"");
        assert!(place < 400.0, "{place}");
    }
}

#[test]
fn a_logarithmic_axis_shows_the_values_that_take_much_of_it() {
    let loss = |step: f64| (step, 2.0 + 8.0 / step.sqrt());
    let mut points: Vec<_> = (1..=100_000).map(f64::from).map(loss).collect();
    points[50_000].1 = 77.0;
    let chart = chart(vec![line("training", points, Look::default())]);
    assert!(chart.values().is_below(3.0));
    let chart = LineChart { log_across: true, ..chart };
    // The axis shows the values of five powers of ten, except the first twentieth, and not the failed step.
    assert!(chart.values().contains(loss(2.0).1) && chart.values().is_below(76.0));
}

#[test]
fn labels_begin_right_of_the_axis() {
    let mut chart = chart(vec![line("training", vec![(0.0, 10.0), (9.0, 20.0)], Look::default())]);
    chart.marks = vec![Mark { at: 0.0, label: "adapt".into() }];
    let svg = drawn(&chart);
    let tag = svg.split(">adapt<").next().unwrap().rsplit('<').next().unwrap();
    assert!(after(tag, "x=\"") > after(&svg, "class=\"base\" d=\"M") + 3.0, "{tag}");
}

#[test]
fn every_number_of_points_gives_a_chart() {
    for points in [
        vec![],
        vec![(5.0, f64::NAN)],
        vec![(5.0, 2.0)],
        vec![(0.0, 0.0)],
        vec![(f64::NAN, 1.0), (f64::INFINITY, 1.0), (-1e300, 1.0)],
        vec![(1.0, f64::MAX), (2.0, f64::MIN), (3.0, 1e99), (4.0, -1e99)],
    ] {
        for (dots, log) in [(false, false), (true, false), (false, true), (true, true)] {
            let look = Look { dots, ..Look::default() };
            let chart = chart(vec![line("loss", points.clone(), look)]);
            let svg = drawn(&LineChart { log_across: log, log_values: log, ..chart });
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{points:?}: {svg}");
        }
    }
    let one = drawn(&chart(vec![line("loss", vec![(5.0, 2.0)], Look::default())]));
    assert_eq!(one.matches("<circle").count(), 1, "{one}");
    assert!(chart(vec![line("loss", vec![(5.0, f64::NAN)], Look::default())]).is_empty());
}

#[test]
fn a_logarithmic_axis_gives_each_power_of_ten_the_same_room() {
    let points = vec![(0.0, 8.0), (1e3, 4.0), (1e6, 2.0), (1e9, -1.0)];
    let look = Look { dots: true, ..Look::default() };
    let linear = chart(vec![line("loss", points, look)]);
    let places = |chart: &LineChart| -> Vec<(f64, f64)> {
        let svg = drawn(chart);
        let tags = svg.split("<circle").skip(1);
        tags.map(|tag| (after(tag, "cx=\""), after(tag, "cy=\""))).collect()
    };
    let near = |a: f64, b: f64| (a - b).abs() < 0.2;
    // A value without a logarithm is not drawn; a place without a logarithm is at the left end.
    let chart = LineChart { log_across: true, log_values: true, ..linear.clone() };
    let [start, thousand, million] = places(&chart)[..] else { panic!() };
    assert_eq!(start.0, thousand.0);
    assert!(near(thousand.1 - start.1, million.1 - thousand.1), "each half is as far");
    let chart = LineChart { log_across: true, ..linear.clone() };
    let [_, thousand, million, billion] = places(&chart)[..] else { panic!() };
    assert!(near(million.0 - thousand.0, billion.0 - million.0));
    assert!(drawn(&chart).contains(">1 M</text>"), "{}", drawn(&chart));
    let [start, _, million, billion] = places(&linear)[..] else { panic!() };
    assert!(million.0 - start.0 < 1.0 && billion.0 - million.0 > 100.0);
}

#[test]
fn a_peak_that_a_curve_and_its_background_share_is_named_once() {
    let points = falling();
    let faint = Look { faint: true, ..Look::default() };
    let lines = vec![line("all", points.clone(), faint), line("means", points, Look::default())];
    assert_eq!(drawn(&chart(lines)).matches(">up to 9.500<").count(), 1);
}

#[test]
fn a_million_points_make_a_small_chart() {
    let points = (0..1_000_000).map(|n| (f64::from(n), f64::from(n % 13))).collect();
    let svg = drawn(&chart(vec![line("loss", points, Look::default())]));
    assert!(svg.len() < 40_000, "{} bytes", svg.len());
}

#[test]
fn labels_at_the_ends_are_apart() {
    assert_eq!(apart(vec![10.0, 11.0, 50.0], 15.0, 100.0), [10.0, 25.0, 50.0]);
    assert_eq!(apart(vec![90.0, 95.0, 99.0], 15.0, 100.0), [70.0, 85.0, 100.0]);
    assert_eq!(apart(vec![], 15.0, 100.0), Vec::<f64>::new());
}

#[test]
fn steps_that_were_not_applied_are_short_lines() {
    let mut chart = chart(vec![line("loss", vec![(0.0, 1.0), (100.0, 2.0)], Look::default())]);
    chart.skipped = vec![50.0, 50.01, 75.0];
    let svg = drawn(&chart);
    assert_eq!(svg.matches("v-9").count(), 2, "{svg}");
}
