//! Datasets on a hub of the loopback interface.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use moh_hf::Error;
use moh_hf::hub::{Dataset, Hub, RemoteFile, read_listing};

use moh_testkit::hub_server::{Behaviour, COMMIT, ID, Server};

static NEVER: AtomicBool = AtomicBool::new(false);

fn files(names: &[&str]) -> HashMap<String, Vec<u8>> {
    names.iter().map(|name| ((*name).to_string(), format!("text of {name}").into_bytes())).collect()
}

struct Place {
    server: Server,
    dir: tempfile::TempDir,
    hub: Hub,
}

impl Place {
    fn new(names: &[&str]) -> Self {
        let (files, dir) = (files(names), tempfile::tempdir().unwrap());
        let server = Server::start(Behaviour { files, is_dataset: true, ..Behaviour::default() });
        let cache = Some(dir.path().join("hub"));
        let hub = Hub { endpoint: Some(server.endpoint.clone()), cache, offline: false };
        Self { server, dir, hub }
    }

    fn dataset(&self) -> Dataset {
        self.hub.dataset(ID, None).unwrap()
    }

    fn folder(&self) -> PathBuf {
        self.dir.path().join("hub/datasets--org--tiny")
    }
}

fn names(files: &[RemoteFile]) -> Vec<&str> {
    files.iter().map(|file| file.name.as_str()).collect()
}

#[test]
fn folders_are_listed_in_pages_with_or_without_those_below() {
    let place = Place::new(&["README.md", "data/a.jsonl", "data/b.jsonl", "data/deep/c.jsonl"]);
    place.server.set(|server| server.page = Some(2));
    let dataset = place.dataset();
    assert_eq!((dataset.id(), dataset.commit.as_str()), (ID, COMMIT));
    assert_eq!(names(&dataset.list("", false).unwrap()), ["README.md"]);
    assert_eq!(dataset.list("", true).unwrap().len(), 4);
    assert_eq!(names(&dataset.list("data", false).unwrap()), ["data/a.jsonl", "data/b.jsonl"]);
    let deep = ["data/a.jsonl", "data/b.jsonl", "data/deep/c.jsonl"];
    assert_eq!(names(&dataset.list("data", true).unwrap()), deep);
    assert_eq!(dataset.list("missing", true).unwrap(), []);
}

#[test]
fn files_are_linked_at_any_depth_and_found_again_offline() {
    let mut place = Place::new(&["README.md", "data/a.jsonl", "data/deep/c.jsonl"]);
    let dataset = place.dataset();
    let online = dataset.list("", true).unwrap();
    for file in &online {
        let path = dataset.fetch(file, None, &NEVER, &mut |_| ()).unwrap();
        assert_eq!(path, place.folder().join("snapshots").join(COMMIT).join(&file.name));
        assert_eq!(fs::read_to_string(path).unwrap(), format!("text of {}", file.name));
    }
    assert_eq!(fs::read_to_string(place.folder().join("refs/main")).unwrap(), COMMIT);
    place.server.log();
    place.hub.offline = true;
    let dataset = place.dataset();
    assert_eq!(dataset.list("data", false).unwrap(), online);
    dataset.fetch(&online[1], None, &NEVER, &mut |_| ()).unwrap();
    fs::remove_file(place.folder().join("snapshots").join(COMMIT).join("data/a.jsonl")).unwrap();
    fs::remove_dir_all(place.folder().join("blobs")).unwrap();
    let error = dataset.fetch(&online[1], None, &NEVER, &mut |_| ()).unwrap_err().to_string();
    assert!(error.starts_with("org/tiny: data/a.jsonl is not in the cache"), "{error}");
    assert!(place.server.log().is_empty());
}

#[test]
fn a_file_elsewhere_leaves_the_cache_alone_unless_it_has_it() {
    let place = Place::new(&["data/a.jsonl"]);
    let (dataset, own) = (place.dataset(), place.dir.path().join("own/a.jsonl"));
    let file = &dataset.list("data", false).unwrap()[0];
    assert_eq!(dataset.fetch(file, Some(&own), &NEVER, &mut |_| ()).unwrap(), own);
    assert!(own.is_file() && !place.folder().exists());
    let cached = dataset.fetch(file, None, &NEVER, &mut |_| ()).unwrap();
    assert_eq!(dataset.fetch(file, Some(&own), &NEVER, &mut |_| ()).unwrap(), cached);
}

#[test]
fn a_lost_connection_is_tried_again_and_a_stop_ends_a_download() {
    let place = Place::new(&["a.jsonl"]);
    let text = vec![b'x'; 3_000_000];
    place.server.set(|server| {
        server.files.insert("a.jsonl".to_string(), text.clone());
        server.breaks = 2;
    });
    let dataset = place.dataset();
    let file = &dataset.list("", false).unwrap()[0];
    let stopped = dataset.fetch(file, None, &AtomicBool::new(true), &mut |_| ()).unwrap_err();
    assert!(matches!(stopped, Error::Stopped), "{stopped}");
    let path = dataset.fetch(file, None, &NEVER, &mut |_| ()).unwrap();
    assert_eq!(fs::read(path).unwrap(), text);
}

#[test]
fn refusals_speak_of_datasets() {
    let place = Place::new(&["a.jsonl"]);
    let page = format!("{}/datasets/{ID}", place.server.endpoint);
    for (status, code, expected) in [
        (
            401,
            "GatedRepo",
            format!("the dataset is gated (401): accept its terms at {page}, then set HF_TOKEN"),
        ),
        (
            401,
            "RepoNotFound",
            format!(
                "the hub requires a login (401): check the name; for a private or gated dataset request access at {page}"
            ),
        ),
        (403, "GatedRepo", "the hub denies access (403)".to_string()),
        (404, "RepoNotFound", format!("no such dataset on the hub (404), see {page}")),
        (
            404,
            "RevisionNotFound",
            "no such dataset on the hub, or it has no revision main (404)".to_string(),
        ),
    ] {
        place.server.set(|server| server.refuse = Some((status, code)));
        let error = place.hub.dataset(ID, None).err().unwrap().to_string();
        assert!(error.starts_with(&format!("{ID}: {expected}")), "{error}");
    }
    let offline = Hub { offline: true, ..place.hub.clone() };
    let error = offline.dataset(ID, None).err().unwrap().to_string();
    assert!(error.contains("is not in the cache") && error.contains("HF_HUB_OFFLINE"), "{error}");
    for id in ["tiny", "../x", "a/b/c", "", "a b/c"] {
        let error = place.hub.dataset(id, None).err().unwrap().to_string();
        assert!(error.contains("is no dataset of the hub: expected OWNER/NAME"), "{error}");
    }
    let error = place.hub.dataset(ID, Some("../main")).err().unwrap().to_string();
    assert!(error.contains("is not a revision"), "{error}");
}

#[test]
fn names_that_leave_the_directory_are_refused() {
    for name in ["../x", "a/../../x", "/etc/passwd", "a//b", "c:\\x"] {
        let place = Place::new(&["a.jsonl", name]);
        let error = place.dataset().list("", true).unwrap_err().to_string();
        assert!(
            error.contains("which is no file of a repository: check that HF_ENDPOINT"),
            "{error}"
        );
        assert!(!place.folder().exists());
    }
    for page in ["{}", "[{\"type\": \"file\", \"path\": \"a\", \"oid\": \"../../x\"}]", "[1]", ""] {
        assert!(read_listing(page.as_bytes()).is_err(), "{page}");
    }
}
