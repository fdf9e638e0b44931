//! What the directory of a model says about where the model comes from: the base model, its licence
//! and how it was made. A model card ([`model_card`](crate::model_card)) hands this on to the next
//! model.
//!
//! Anyone can have made the directory: sizes are bounded, and only plain values reach a card.

use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::front_matter;
use crate::model_card::{CARD_FILE, Card, was_card};

/// A longer README or licence is not read.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Longest value of the front matter, and longest name.
const MAX_VALUE_CHARS: usize = 200;
/// Beginnings of the names of files with a licence's terms.
const TERMS: [&str; 5] = ["LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY"];

/// The model that a model was made from first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    /// Its id on the hub, or the name of its directory.
    pub name: String,
    /// Whether the name is an id on the hub.
    pub is_hub_id: bool,
}

impl Base {
    /// The model with this id on the hub; `None` if it is no id.
    pub fn on_hub(id: &str) -> Option<Self> {
        let is_id = is_hub_id(id) && is_plain(id);
        is_id.then(|| Base { name: id.to_owned(), is_hub_id: true })
    }

    /// The model that a user calls `name`, which may be a directory, perhaps of the hub's cache.
    pub fn from_name(name: &str) -> Self {
        let path = Path::new(name);
        // A directory that is gone is no id, but for names that could be either.
        if let Some(base) = Base::on_hub(name).filter(|_| !path.is_dir()) {
            return base;
        }
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        let cached = path.components().find_map(|part| {
            let id = part.as_os_str().to_str()?.strip_prefix("models--")?;
            id.contains("--").then(|| id.replacen("--", "/", 1))
        });
        let own = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        let is_hub_id = cached.is_some();
        Base { name: plain(&cached.unwrap_or_else(|| own.into_owned())), is_hub_id }
    }
}

/// Where a model comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origin {
    /// The models that it was made from first: one, or several that were merged; none if it began with
    /// random weights.
    pub bases: Vec<Base>,
    /// `license`, `license_name` and `license_link` of the front matter, as far as they are there.
    pub licence: Vec<(&'static str, String)>,
    /// Files with the licence's terms, which a copy of the model comes with.
    pub terms: Vec<PathBuf>,
    /// How the model was made, in paragraphs of Markdown.
    pub made: Vec<String>,
}

impl Origin {
    /// Reads what `directory` says of its model, which the user calls `name`. A card of this
    /// program there says what the model's own base is and how it was made. Of a card that was changed,
    /// and of any other README of a directory, the front matter says what the base is. A model of the
    /// hub with another README is the base itself.
    ///
    /// # Errors
    /// Fails if the directory cannot be listed or its README cannot be read.
    pub fn read(name: Option<&str>, directory: &Path) -> Result<Self, Error> {
        let readme = read_text(&directory.join(CARD_FILE))?.unwrap_or_default();
        let (licence, terms) = (front_matter::licence(&readme), terms_of(directory)?);
        if let Some(Card { bases, made, .. }) = Card::parse(&readme) {
            return Ok(Origin { bases, licence, terms, made });
        }
        let own: Vec<Base> = name.map(Base::from_name).into_iter().collect();
        let is_on_hub = own.iter().any(|base| base.is_hub_id) && !was_card(&readme);
        let stated = if is_on_hub { Vec::new() } else { front_matter::base_models(&readme) };
        let bases = if stated.is_empty() { own } else { stated };
        Ok(Origin { bases, licence, terms, made: Vec::new() })
    }

    /// Replaces what the source says of its licence by the id of one, as the hub lists them. The id `other`
    /// keeps `license_name` and `license_link`, which name a licence that the hub does not list.
    pub fn set_license(&mut self, id: &str) {
        self.licence.retain(|(key, _)| id == OTHER_LICENCE && *key != LICENCE);
        self.licence.insert(0, (LICENCE, id.to_owned()));
    }
}

/// The field of the front matter with the id of the licence.
const LICENCE: &str = "license";
/// The id of a licence that the hub does not list.
const OTHER_LICENCE: &str = "other";

/// Whether a file of that name has a licence's terms: `LICENSE`, `LICENSE.txt`, `NOTICE`,
/// `USE_POLICY.md` and the like.
pub fn is_terms_file(name: &str) -> bool {
    let extension = Path::new(name).extension().and_then(|extension| extension.to_str());
    TERMS.iter().any(|start| name.starts_with(start))
        && matches!(extension, None | Some("txt" | "md"))
}

fn terms_of(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(Error::io(directory))? {
        let path = entry.map_err(Error::io(directory))?.path();
        let is_terms = path.file_name().and_then(|name| name.to_str()).is_some_and(is_terms_file);
        if is_terms
            && fs::metadata(&path).is_ok_and(|file| file.is_file() && file.len() <= MAX_FILE_BYTES)
        {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The text of a README; `None` if it is missing or too large.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>, Error> {
    match fs::metadata(path) {
        Ok(file) if file.is_file() && file.len() <= MAX_FILE_BYTES => {
            let bytes = fs::read(path).map_err(Error::io(path))?;
            Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
        }
        _ => Ok(None),
    }
}

/// Whether `name` is an id on the hub, if it is no directory: `name` or `organisation/name`.
pub fn is_hub_id(name: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && part.len() <= 96
            && !part.starts_with(['.', '-'])
            && !part.contains("..")
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    name.split('/').count() <= 2 && name.split('/').all(is_part)
}

/// Whether a value needs no quotes in YAML and no escapes in Markdown.
pub(crate) fn is_plain(value: &str) -> bool {
    value.len() <= MAX_VALUE_CHARS
        && value.starts_with(|c: char| c.is_ascii_alphanumeric())
        && value.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:+".contains(c))
        && !value.ends_with(':')
}

/// Whether `id` can be the id of a licence in a card, such as `apache-2.0` or `llama3`.
pub fn is_license_id(id: &str) -> bool {
    is_plain(id) && !id.contains(['/', ':'])
}

/// A name with `_` in place of the characters that [`is_plain`] refuses.
fn plain(name: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "-_./".contains(c) { c } else { '_' };
    let name: String = name.chars().take(MAX_VALUE_CHARS).map(safe).collect();
    match name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        true => name,
        false => format!("model{name}"),
    }
}

/// Whether a name is one that [`plain`] leaves as it is.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && plain(name) == name
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(readme: &str) -> Origin {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(CARD_FILE), readme).unwrap();
        Origin::read(Some("org/name"), dir.path()).unwrap()
    }

    #[test]
    fn the_front_matter_of_a_directory_or_of_a_changed_card_names_the_base() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().to_string_lossy();
        let bases = |name: &str, readme: &str| -> Vec<(String, bool)> {
            fs::write(dir.path().join(CARD_FILE), readme).unwrap();
            let origin = Origin::read(Some(name), dir.path()).unwrap();
            origin.bases.into_iter().map(|base| (base.name, base.is_hub_id)).collect()
        };
        let on_hub = |names: &[&str]| -> Vec<_> {
            names.iter().map(|name| ((*name).to_owned(), true)).collect()
        };
        let readme = "---\nbase_model: acme/Tiny\n---\n";
        assert_eq!(bases(&directory, readme), on_hub(&["acme/Tiny"]));
        // A fine-tune on the hub is the base of models that are made from it.
        assert_eq!(bases("acme/Tuned", readme), on_hub(&["acme/Tuned"]));
        let merged = "---\nbase_model:\n- acme/Tiny\n- acme/Small\n---\n";
        assert_eq!(bases(&directory, merged), on_hub(&["acme/Tiny", "acme/Small"]));
        assert!(!bases(&directory, "---\nbase_model: /mnt/models/x\n---\n")[0].1);
        let origin =
            Origin { bases: vec![Base::on_hub("acme/Tiny").unwrap()], ..Origin::default() };
        let card = crate::model_card::of_origin(&origin);
        for changed in
            [card.replace("custom_code", "mine"), card.replace("made\n", "made\n\nBy me.\n")]
        {
            assert_ne!(changed, card);
            assert_eq!(bases(&directory, &changed), on_hub(&["acme/Tiny"]));
            assert_eq!(bases("acme/Edited", &changed), on_hub(&["acme/Tiny"]));
        }
    }

    #[test]
    fn a_licence_that_is_named_replaces_the_one_that_was_stated() {
        let stated = "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\n---\n";
        let with = |id: &str| {
            let mut found = origin(stated);
            found.set_license(id);
            found.licence
        };
        assert_eq!(with("mit"), [("license", "mit".to_owned())]);
        assert_eq!(with("other"), origin(stated).licence);
        assert!(is_license_id("cc-by-4.0") && !is_license_id("a b") && !is_license_id("x: y"));
    }

    #[test]
    fn a_readme_that_is_none_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(CARD_FILE);
        fs::write(&path, b"---\nlicense: mit\n\xff\xfe---").unwrap();
        assert_eq!(
            Origin::read(None, dir.path()).unwrap().licence,
            [("license", "mit".to_string())]
        );
        fs::File::create(&path).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        assert_eq!(Origin::read(None, dir.path()).unwrap(), Origin::default());
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(Origin::read(None, dir.path()).unwrap(), Origin::default());
        let message = Origin::read(None, &dir.path().join("none")).unwrap_err().to_string();
        assert!(message.contains("none: "), "{message}");
    }

    #[test]
    fn a_directory_has_its_own_name_and_a_snapshot_its_id() {
        let dir = tempfile::tempdir().unwrap();
        let named = |path: &Path| Base::from_name(path.to_str().unwrap());
        let own = dir.path().join("a b");
        let snapshot = dir.path().join("models--org--name/snapshots/0123");
        for path in [&own, &snapshot] {
            fs::create_dir_all(path).unwrap();
        }
        assert_eq!(named(&own), Base { name: "a_b".into(), is_hub_id: false });
        assert_eq!(named(&snapshot), Base { name: "org/name".into(), is_hub_id: true });
        assert_eq!(Base::from_name("org/x"), Base { name: "org/x".into(), is_hub_id: true });
        assert_eq!(Base::from_name("runs/x@200"), Base { name: "x_200".into(), is_hub_id: false });
        assert_eq!(Base::from_name("/gone/x"), Base { name: "x".into(), is_hub_id: false });
        assert_eq!(Base::from_name("\n---").name, "model_---");
    }

    #[test]
    fn terms_are_files_with_a_name_of_terms() {
        let dir = tempfile::tempdir().unwrap();
        for name in
            ["LICENSE", "LICENSE-MIT", "NOTICE.txt", "USE_POLICY.md", "LICENSE.py", "license"]
        {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        fs::create_dir(dir.path().join("LICENSES")).unwrap();
        fs::File::create(dir.path().join("COPYING")).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
        let terms = Origin::read(None, dir.path()).unwrap().terms;
        let expected = ["LICENSE", "LICENSE-MIT", "NOTICE.txt", "USE_POLICY.md"];
        assert_eq!(terms, expected.map(|name| dir.path().join(name)));
    }
}
