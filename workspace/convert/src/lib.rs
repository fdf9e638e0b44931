//! Hub download, conversion to Mixture-of-Head, vocabulary expansion and export.
