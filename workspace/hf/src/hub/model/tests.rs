use super::*;
use std::collections::HashMap;
use std::net::TcpListener;

use moh_testkit::hub_server::{Behaviour, COMMIT, ID, Server, address_of};
use moh_testkit::programs::names;

use crate::hub_cache::{commit_of, find_model, is_contained, is_content_address};

fn files(weights: usize) -> HashMap<String, Vec<u8>> {
    let weights = (0..weights).map(|byte| (byte / 251) as u8).collect();
    HashMap::from([
        ("config.json".to_string(), b"{}".to_vec()),
        ("tokenizer.json".to_string(), b"[]".to_vec()),
        ("added_tokens.json".to_string(), Vec::new()),
        ("chat_template.jinja".to_string(), b"hi".to_vec()),
        ("additional_chat_templates/tool_use.jinja".to_string(), b"tool".to_vec()),
        ("model.safetensors".to_string(), weights),
        ("pytorch_model.bin".to_string(), b"pickle".to_vec()),
        ("README.md".to_string(), b"text".to_vec()),
    ])
}

struct Place {
    dir: tempfile::TempDir,
    hub: Hub,
}

fn place(server: &Server) -> Place {
    let dir = tempfile::tempdir().unwrap();
    let cache = Some(dir.path().join("hub"));
    let hub = Hub { endpoint: Some(server.endpoint.clone()), cache, offline: false };
    Place { dir, hub }
}

fn resolve_error(hub: &Hub) -> String {
    let message = hub.resolve(FileSet::Model, ID, None, &mut |_, _| ()).unwrap_err().to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

#[test]
fn a_model_is_fetched_once_into_the_shared_cache() {
    let wanted = files(1000);
    let server = Server::start(Behaviour { files: wanted.clone(), ..Behaviour::default() });
    let Place { dir, mut hub } = place(&server);
    let mut last = (0, 0);
    let path =
        hub.resolve(FileSet::Model, ID, None, &mut |bytes, total| last = (bytes, total)).unwrap();
    assert_eq!(last, (1014, 1014));
    let root = dir.path().join("hub/models--org--tiny");
    assert_eq!(path, root.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    let expected = [
        "README.md",
        "added_tokens.json",
        "additional_chat_templates",
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ];
    assert_eq!(names(&path), expected);
    for (name, bytes) in wanted.iter().filter(|(name, _)| *name != "pytorch_model.bin") {
        assert_eq!(&fs::read(path.join(name)).unwrap(), bytes, "{name}");
    }
    server.log();
    hub.resolve(FileSet::Model, ID, None, &mut |_, _| ()).unwrap();
    assert!(server.log().iter().all(|line| line.starts_with("GET /api/")));
    // A directory is the model itself.
    assert_eq!(
        hub.resolve(FileSet::Model, path.to_str().unwrap(), None, &mut |_, _| ()).unwrap(),
        path
    );
    hub.offline = true;
    assert_eq!(hub.resolve(FileSet::Model, ID, None, &mut |_, _| ()).unwrap(), path);
    assert_eq!(hub.resolve(FileSet::Model, ID, Some(COMMIT), &mut |_, _| ()).unwrap(), path);
    assert!(server.log().is_empty());
}

#[test]
fn a_tokenizer_is_fetched_without_the_weights() {
    let server = Server::start(Behaviour { files: files(1000), ..Behaviour::default() });
    let Place { dir: _dir, mut hub } = place(&server);
    let path = hub.resolve(FileSet::Tokenizer, ID, None, &mut |_, _| ()).unwrap();
    let expected =
        ["added_tokens.json", "additional_chat_templates", "chat_template.jinja", "tokenizer.json"];
    assert_eq!(names(&path), expected);
    hub.offline = true;
    assert_eq!(hub.resolve(FileSet::Tokenizer, ID, None, &mut |_, _| ()).unwrap(), path);
    // A tokenizer is not a model.
    assert!(resolve_error(&hub).contains("is not in the cache"));
    hub.offline = false;
    assert_eq!(hub.resolve(FileSet::Model, ID, None, &mut |_, _| ()).unwrap(), path);
    assert!(path.join("model.safetensors").exists());

    let mut files = files(10);
    files.remove("tokenizer.json");
    let server = Server::start(Behaviour { files, ..Behaviour::default() });
    let Place { dir: _dir, hub } = place(&server);
    let error = hub.resolve(FileSet::Tokenizer, ID, None, &mut |_, _| ()).unwrap_err().to_string();
    assert!(error.contains("has no tokenizer.json"), "{error}");
}

#[test]
fn offline_without_a_cached_model_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub { cache: Some(dir.path().to_path_buf()), offline: true, ..Hub::default() };
    let message = resolve_error(&hub);
    assert!(message.contains("is not in the cache") && message.contains("HF_HUB_OFFLINE"));
    assert!(message.contains("no such directory in /"), "{message}");
    let message =
        hub.resolve(FileSet::Model, ID, Some("../../x"), &mut |_, _| ()).unwrap_err().to_string();
    assert!(message.contains("is not a revision"), "{message}");
}

#[test]
fn a_broken_download_goes_on_where_it_stopped() {
    let size = 5_012_345;
    let files = files(size);
    let weights = files["model.safetensors"].clone();
    let breaks_after = Some(size - 2_000_000);
    let server = Server::start(Behaviour { files, breaks_after, ..Behaviour::default() });
    let Place { dir, hub } = place(&server);
    let message = resolve_error(&hub);
    assert!(message.contains("run the same command again"), "{message}");
    let blobs = dir.path().join("hub/models--org--tiny/blobs");
    let partial = fs::read_dir(&blobs)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension().is_some_and(|ext| ext == "incomplete"))
        .unwrap();
    let have = fs::metadata(&partial).unwrap().len();
    assert!(have > 0 && have < size as u64, "{have}");
    assert_eq!(fs::read(&partial).unwrap(), weights[..have as usize]);

    server.behaviour.lock().unwrap().breaks_after = None;
    server.log();
    let mut first = None;
    let path = hub
        .resolve(FileSet::Model, ID, None, &mut |bytes, _| {
            // More bytes than the other files have.
            if bytes > 100 && first.is_none() {
                first = Some(bytes);
            }
        })
        .unwrap();
    assert!(first.unwrap() >= have);
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights);
    let request = format!("GET /{ID}/resolve/{COMMIT}/model.safetensors");
    let log = server.log().into_iter().filter(|line| line.starts_with(&request));
    assert_eq!(log.collect::<Vec<_>>(), [format!("{request} {have}-")]);
    assert!(!partial.exists());
}

#[test]
fn a_complete_or_too_long_partial_file_is_no_obstacle() {
    let wanted = files(5000);
    let server = Server::start(Behaviour { files: wanted.clone(), ..Behaviour::default() });
    let weights = &wanted["model.safetensors"];
    for partial in [weights.clone(), [weights.clone(), vec![0]].concat()] {
        let Place { dir, hub } = place(&server);
        let blobs = dir.path().join("hub/models--org--tiny/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(format!("{}.incomplete", address_of(weights))), partial).unwrap();
        let path = hub.resolve(FileSet::Model, ID, None, &mut |_, _| ()).unwrap();
        assert_eq!(&fs::read(path.join("model.safetensors")).unwrap(), weights);
    }
}

#[test]
fn a_server_without_ranges_serves_too() {
    let files = files(300_000);
    let weights = files["model.safetensors"].clone();
    let server =
        Server::start(Behaviour { files, ignores_ranges: true, breaks: 1, ..Behaviour::default() });
    let Place { dir: _dir, hub } = place(&server);
    let path = hub.resolve(FileSet::Model, ID, None, &mut |_, _| ()).unwrap();
    let asked = server.log().into_iter().filter(|line| line.ends_with("model.safetensors 150000-"));
    assert_eq!(asked.count(), 1);
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights);
}

#[test]
fn refusals_say_what_to_do_and_leave_nothing_in_the_way() {
    for (status, code, expected) in [
        (401, "GatedRepo", "the model is gated (401): accept its terms at http://127.0.0.1"),
        (401, "RepoNotFound", "the hub requires a login (401): check the name"),
        (403, "GatedRepo", "the hub denies access (403): request it at"),
        (404, "RepoNotFound", ", and no such model on the hub (404)"),
        (404, "RevisionNotFound", "it has no revision main (404)"),
    ] {
        let refuse = Some((status, code));
        let files = files(100);
        let server = Server::start(Behaviour { files, refuse, ..Behaviour::default() });
        let Place { dir, hub } = place(&server);
        let message = resolve_error(&hub);
        assert!(message.starts_with("org/tiny: ") && message.contains(expected), "{message}");
        assert!(!dir.path().join("hub").exists());
        server.behaviour.lock().unwrap().refuse = None;
        hub.resolve(FileSet::Model, ID, None, &mut |_, _| ()).unwrap();
    }
}

#[test]
fn no_answer_is_one_sentence() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let dir = tempfile::tempdir().unwrap();
    let cache = Some(dir.path().to_path_buf());
    let hub = Hub { endpoint: Some(endpoint.clone()), cache, offline: false };
    let message = resolve_error(&hub);
    let local =
        format!("org/tiny: no such directory in {}", std::env::current_dir().unwrap().display());
    let expected = format!("{local}, and no response from {endpoint}: check the path");
    assert!(message.starts_with(&expected), "{message}");
    let nonsense = Hub { endpoint: Some("not a url".to_string()), ..hub };
    assert!(resolve_error(&nonsense).starts_with("org/tiny: "));
}

#[test]
fn models_without_safetensors_are_refused() {
    for (name, expected) in [
        ("model.safetensors", "no weights in safetensors format"),
        ("config.json", "no config.json"),
    ] {
        let mut files = files(100);
        files.remove(name);
        let server = Server::start(Behaviour { files, ..Behaviour::default() });
        let Place { dir: _dir, hub } = place(&server);
        assert!(resolve_error(&hub).contains(expected));
    }
}

#[test]
fn names_from_the_hub_stay_in_their_directory() {
    for name in ["../x", "a/../b", "/etc/passwd", "a//b", "", ".", "c:\\x"] {
        assert!(!is_contained(name), "{name}");
    }
    for name in ["refs/pr/1", "main", "v1.0"] {
        assert!(is_contained(name), "{name}");
    }
    assert!(!is_wanted("original/model.safetensors") && !is_wanted("x.bin"));
    assert!(!is_content_address("../../x") && is_content_address(COMMIT));
}

#[cfg(unix)]
#[test]
#[ignore = "needs a user who may not read everything, as root may"]
fn a_directory_without_permission_is_no_hub_id() {
    use std::os::unix::fs::PermissionsExt;

    let dir = tempfile::tempdir().unwrap();
    let closed = dir.path().join("closed");
    fs::create_dir_all(closed.join("model")).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
    let from = closed.join("model");
    let message = Hub::default()
        .resolve(FileSet::Model, from.to_str().unwrap(), None, &mut |_, _| ())
        .unwrap_err();
    assert!(message.to_string().contains("ermission denied"), "{message}");
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn a_commit_that_was_downloaded_is_found_in_the_cache_while_its_weights_are_there() {
    let header = br#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let weights = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
    let wanted = HashMap::from([
        ("config.json".to_string(), b"{}".to_vec()),
        ("model.safetensors".to_string(), weights),
    ]);
    let server = Server::start(Behaviour { files: wanted, ..Behaviour::default() });
    let Place { dir, hub } = place(&server);
    let cached = |id: &str, commit: &str| find_model(&dir.path().join("hub"), id, commit);
    assert_eq!(cached(ID, COMMIT), None);
    let path = hub.resolve(FileSet::Model, ID, None, &mut |_, _| ()).unwrap();
    assert_eq!(commit_of(dir.path()), None);
    assert_eq!(cached(ID, "main").as_ref(), Some(&path));
    server.log();
    // Another process has moved the branch in the meantime.
    let reference = dir.path().join("hub/models--org--tiny/refs/main");
    fs::write(reference, COMMIT.replace('0', "f")).unwrap();
    assert_eq!(cached(ID, COMMIT).as_ref(), Some(&path));
    assert_eq!(cached(ID, &COMMIT.replace('0', "f")), None);
    assert!(server.log().is_empty());
}
