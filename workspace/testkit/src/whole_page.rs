//! The properties of every page.

/// Checks that a page is complete, fetches nothing and shows no NaN.
pub fn check(page: &str) {
    assert!(page.starts_with("<!DOCTYPE html><html lang=\"en\">") && page.ends_with("</html>\n"));
    for absent in ["http://", "https://", "<script", "url(", "@import", "NaN", "\"inf"] {
        let page = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!page.contains(absent), "{absent}");
    }
    for element in ["svg", "g", "figure", "section", "table", "details", "text"] {
        let opened = page.matches(&format!("<{element}>")).count()
            + page.matches(&format!("<{element} ")).count();
        assert_eq!(opened, page.matches(&format!("</{element}>")).count(), "{element}");
    }
}
