//! The hub's listing of a dataset's files.

use moh_testkit::fuzz::Target;

use crate::ALLOCATOR;

#[test]
fn a_mutated_listing_has_names_that_stay_in_their_directory() {
    let page = "[{\"type\":\"directory\",\"oid\":\"a1\",\"size\":0,\"path\":\"data\"},\
                {\"type\":\"file\",\"oid\":\"b2\",\"size\":7,\"path\":\"data/a.txt\"},\
                {\"type\":\"file\",\"oid\":\"c3\",\"size\":9,\"path\":\"data/b.txt\",\"lfs\":{\"oid\":\"d4\",\"size\":9}}]";
    let seeds = [page.as_bytes().to_vec(), b"[]".to_vec()];
    // An entry takes several times the bytes of its text.
    let target = Target { name: "listing", seeds: &seeds, memory: 32 << 20, allocator: &ALLOCATOR };
    target.run(|input| {
        for name in moh_hf::hub::read_listing(input)?.iter().map(|file| &file.name) {
            let path = std::path::Path::new(name);
            let is_plain = |part| matches!(part, std::path::Component::Normal(_));
            assert!(path.components().all(is_plain) && !name.is_empty(), "{name}");
        }
        Ok(())
    });
}
