//! Input from a network: messages between ranks at their rendezvous, and the hub's listing of a
//! dataset's files.

use crate::target;

#[test]
fn mutated_messages_are_read_or_refused() {
    let hello = br#"{"Hello":{"protocol":1,"job":"j","rank":1,"size":2,"place":"host 7","fingerprint":"f"}}"#;
    let welcome = br#"{"Welcome":{"who":"rank 0","payload":[1,2,255]}}"#;
    let framed = |text: &[u8]| [&(text.len() as u32).to_le_bytes(), text].concat();
    let seeds = &[framed(hello), framed(welcome), framed(br#""Alive""#)];
    target("rendezvous", seeds, 16).run(moh_comm::check_messages);
}

#[test]
fn a_mutated_listing_has_names_that_stay_in_their_directory() {
    let page = "[{\"type\":\"directory\",\"oid\":\"a1\",\"size\":0,\"path\":\"data\"},\
                {\"type\":\"file\",\"oid\":\"b2\",\"size\":7,\"path\":\"data/a.txt\"},\
                {\"type\":\"file\",\"oid\":\"c3\",\"size\":9,\"path\":\"data/b.txt\",\"lfs\":{\"oid\":\"d4\",\"size\":9}}]";
    let seeds = [page.as_bytes().to_vec(), b"[]".to_vec()];
    // An entry needs several times the bytes of its text.
    target("listing", &seeds, 32).run(|input| {
        for name in moh_hf::hub::read_listing(input)?.iter().map(|file| &file.name) {
            let path = std::path::Path::new(name);
            let is_plain = |part| matches!(part, std::path::Component::Normal(_));
            assert!(path.components().all(is_plain) && !name.is_empty(), "{name}");
        }
        Ok(())
    });
}
