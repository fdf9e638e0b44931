//! The page at `/`: a conversation, and next to each token the heads that it computed. The page asks only this server.

use axum::Router;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS,
};
use axum::response::IntoResponse;
use axum::routing::get;

/// The page may load its own script and style, and this server's answers.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Returns the paths of the page.
pub fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    Router::new()
        .route("/", get(|| file("text/html", include_str!("index.html"))))
        .route("/page.js", get(|| file("text/javascript", include_str!("page.js"))))
        .route("/page.css", get(|| file("text/css", include_str!("page.css"))))
}

async fn file(kind: &str, text: &'static str) -> impl IntoResponse {
    let headers = [
        (CONTENT_TYPE, format!("{kind}; charset=utf-8")),
        (CACHE_CONTROL, "no-store".to_owned()),
        (CONTENT_SECURITY_POLICY, POLICY.to_owned()),
        (X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
    ];
    (headers, text)
}
