use super::*;
use moh_testkit::programs::names;
use std::io;

fn spec(name: &str, shape: &[usize], dtype: DType) -> TensorSpec {
    TensorSpec { name: name.to_string(), shape: shape.to_vec(), dtype }
}

fn specs() -> Vec<TensorSpec> {
    vec![spec("a", &[3, 5], DType::BF16), spec("b", &[4], DType::F32), spec("c", &[7], DType::BF16)]
}

/// Returns bytes that are finite in every type.
fn content(spec: &TensorSpec) -> Vec<u8> {
    (0..spec.num_bytes()).map(|byte| (byte as u8 ^ spec.name.as_bytes()[0]) & 0x3f).collect()
}

fn config() -> Map<String, Value> {
    crate::config_file::tests::small_llama(false).fields
}

fn write(out: &Path, force: bool, max_shard_bytes: u64) -> Result<Written, Error> {
    let (tensors, config) = (specs(), config());
    let model = Contents::new(&config, &tensors, max_shard_bytes);
    write_model(out, force, &model, &mut |spec, sink| {
        content(spec).chunks(3).try_for_each(&mut *sink)
    })
}

#[test]
fn what_is_written_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    for (max, files) in [(1000, 1), (29, 3), (30, 2), (46, 2), (1, 3)] {
        let out = dir.path().join(format!("deeper/m{max}"));
        let written = write(&out, false, max).unwrap();
        assert_eq!((written.shards, written.bytes), (files, 60), "{max}");
        let read = WeightFiles::open(&out).unwrap();
        for (spec, hash) in specs().iter().zip(&written.hashes) {
            let tensor = read.get(&spec.name).unwrap();
            assert_eq!((tensor.dtype, tensor.shape), (spec.dtype, &spec.shape[..]));
            assert_eq!(tensor.bytes, content(spec));
            assert_eq!(blake3::hash(tensor.bytes), *hash);
        }
        let written = fs::read_to_string(out.join("config.json")).unwrap();
        assert!(written.starts_with("{\n  \"model_type\": \"llama\",\n"), "{written}");
        assert_eq!(serde_json::from_str::<Map<String, Value>>(&written).unwrap(), config());
    }
    let index = fs::read_to_string(dir.path().join("deeper/m46").join(INDEX_FILE)).unwrap();
    let index: Value = serde_json::from_str(&index).unwrap();
    assert_eq!(index["metadata"]["total_size"], json!(60));
    assert_eq!(index["weight_map"]["c"], json!("model-00002-of-00002.safetensors"));
    assert_eq!(names(&dir.path().join("deeper")), ["m1", "m1000", "m29", "m30", "m46"]);
}

#[test]
fn a_mixture_of_head_model_has_the_code_that_its_auto_map_names() {
    for (model_type, class, files) in [("moh_llama", "MohLlama", 2), ("moh_qwen3", "MohQwen3", 4)] {
        let dir = tempfile::tempdir().unwrap();
        let fields = json!({
            "model_type": model_type, "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 2,
            "moh_router": "query-norm", "moh_shared_heads": 2, "moh_routed_top_k": 1,
        });
        let file = crate::ConfigFile::from_value(fields, Path::new("config.json")).unwrap();
        let out = dir.path().join("m");
        crate::write_random_model(&out, &file, DType::F32, 1 << 30, 1).unwrap();
        assert_eq!(names(&out).iter().filter(|name| name.ends_with(".py")).count(), files);
        let auto_map = &crate::ConfigFile::read(&out).unwrap().fields["auto_map"];
        for key in ["AutoConfig", "AutoModel", "AutoModelForCausalLM"] {
            let (module, name) = auto_map[key].as_str().unwrap().split_once('.').unwrap();
            let code = fs::read_to_string(out.join(format!("{module}.py"))).unwrap();
            assert!(name.starts_with(class) && code.contains(&format!("class {name}(")), "{name}");
        }
        // A dense model has no code and no `auto_map`.
        let mut dense = file.clone();
        dense.config.moh = None;
        let out = dir.path().join("dense");
        crate::write_random_model(&out, &dense, DType::F32, 1 << 30, 1).unwrap();
        assert_eq!(names(&out), ["config.json", "model.safetensors"]);
        assert!(!crate::ConfigFile::read(&out).unwrap().fields.contains_key("auto_map"));
    }
}

#[test]
fn other_readers_read_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    write(&out, false, 1000).unwrap();
    let bytes = fs::read(out.join(WEIGHTS_FILE)).unwrap();
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header % 8, 0);
    assert_eq!(metadata.metadata().as_ref().unwrap()["format"], "pt");
    // The widest elements come first, so that every tensor is aligned.
    assert_eq!(metadata.offset_keys(), ["b", "a", "c"]);
}

#[test]
fn only_a_model_directory_is_replaced_and_only_when_forced() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    fs::create_dir(&out).unwrap();
    write(&out, false, 30).unwrap();
    let message = write(&out, false, 1000).unwrap_err().to_string();
    assert!(message.contains("is not empty: choose another --out, or --force"), "{message}");
    write(&out, true, 1000).unwrap();
    assert_eq!(names(&out), ["config.json", "model.safetensors"]);

    fs::write(out.join("thesis.txt"), "mine").unwrap();
    let message = write(&out, true, 1000).unwrap_err().to_string();
    assert!(message.contains("also holds thesis.txt"), "{message}");
    assert_eq!(names(&out), ["config.json", "model.safetensors", "thesis.txt"]);
    assert_eq!(names(dir.path()), ["m"]);
}

#[test]
fn a_file_that_arrives_while_the_model_is_written_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    write(&out, false, 1000).unwrap();
    let (tensors, config) = (specs(), config());
    let model = Contents::new(&config, &tensors, 1000);
    let fill: &mut Fill<'_, Error> = &mut |spec, sink| sink(&content(spec));
    let pending = prepare_model(&out, true, &model, fill).unwrap();
    fs::write(out.join("thesis.txt"), "mine").unwrap();
    assert!(pending.publish().is_err());
    assert_eq!(fs::read_to_string(out.join("thesis.txt")).unwrap(), "mine");
    assert_eq!(names(dir.path()), ["m"]);
}

#[cfg(unix)]
#[test]
fn what_a_killed_process_left_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let left = dir.path().join(".tmp-m-Ab3dE9");
    fs::create_dir(&left).unwrap();
    fs::write(left.join(WEIGHTS_FILE), "half").unwrap();
    write(&dir.path().join("m"), false, 1000).unwrap();
    assert_eq!(names(dir.path()), ["m"]);
}

#[test]
fn an_error_leaves_what_was_there() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    write(&out, false, 1000).unwrap();
    let before = fs::read(out.join(WEIGHTS_FILE)).unwrap();
    let (tensors, config) = (specs(), Map::new());
    let missing = [PathBuf::from("/no/such/file")];
    for (companions, bytes) in [(&missing[..0], 5), (&missing[..0], 100), (&missing[..], 0)] {
        let model = Contents { companions, ..Contents::new(&config, &tensors, 40) };
        let result =
            write_model(&out, true, &model, &mut |spec, sink: &mut Sink<'_, Error>| match bytes {
                0 => sink(&content(spec)),
                bytes => sink(&vec![0; bytes]),
            });
        assert!(result.is_err());
        assert_eq!(names(dir.path()), ["m"]);
        assert_eq!(fs::read(out.join(WEIGHTS_FILE)).unwrap(), before);
    }
}

/// A disk with this number of free bytes.
struct Disk(usize);

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0 == 0 {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        let written = bytes.len().min(self.0);
        self.0 -= written;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_disk_is_an_error_wherever_it_fills_up() {
    let tensors = specs();
    let tensors: Vec<&TensorSpec> = tensors.iter().collect();
    let write = |room| {
        let fill: &mut Fill<'_, Error> = &mut |spec, sink| sink(&content(spec));
        write_shard(&mut Disk(room), Path::new("shard"), &tensors, fill)
    };
    let needed = (1..1000).find(|&room| write(room).is_ok()).unwrap();
    for room in 0..needed {
        let message = write(room).unwrap_err().to_string();
        assert!(message.starts_with("shard: "), "{message}");
    }
}

#[test]
fn companions_are_the_tokenizers_and_the_generation_settings() {
    let dir = tempfile::tempdir().unwrap();
    let (source, tokenizer) = (dir.path().join("s"), dir.path().join("t"));
    for dir in [&source, &tokenizer] {
        fs::create_dir(dir).unwrap();
        fs::create_dir(dir.join(TEMPLATES_FOLDER)).unwrap();
        for name in [
            "tokenizer.json",
            "generation_config.json",
            "README.md",
            "chat_template.jinja",
            "additional_chat_templates/rag.jinja",
            "additional_chat_templates/notes.txt",
        ] {
            fs::write(dir.join(name), "x").unwrap();
        }
    }
    let files = companion_files(&source, &tokenizer).unwrap();
    let expected = [
        "s/generation_config.json",
        "t/additional_chat_templates/rag.jinja",
        "t/chat_template.jinja",
        "t/tokenizer.json",
    ];
    assert_eq!(files, expected.map(|name| dir.path().join(name)));
    let out = dir.path().join("out");
    let (config, tensors) = (Map::new(), []);
    let contents = Contents { companions: &files, ..Contents::new(&config, &tensors, 1) };
    write_model(&out, false, &contents, &mut |_, _| Ok::<_, Error>(())).unwrap();
    for path in &files {
        assert!(out.join(companion_name(path)).is_file(), "{}", path.display());
    }
    #[cfg(unix)]
    for (name, place) in [("added_tokens.json", &tokenizer), ("generation_config.json", &source)] {
        let _ = fs::remove_file(place.join(name));
        std::os::unix::fs::symlink("../gone", place.join(name)).unwrap();
        let message = companion_files(&source, &tokenizer).unwrap_err().to_string();
        assert!(message.contains(&format!("{name}: is a link to ../gone")), "{message}");
        fs::remove_file(place.join(name)).unwrap();
    }
}
