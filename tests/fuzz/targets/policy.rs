//! Policies of signatures, as an administrator writes them, and names of images: any text is read or refused, and what was read is passed
//! to workers unchanged.
#![no_main]

use coracle_reference::{Name, Reference};
use coracle_signature::{Policy, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = Policy::from_bytes(data);
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(name) = Name::parse(text) {
        assert_eq!(Name::parse(&name.to_string()), Ok(name.clone()));
        let reference = Reference::from(name);
        assert_eq!(Reference::from(Name::from(reference.clone())), reference);
    }
    let Ok(policy) = parse(text, &|_| Err("no file".to_owned())) else { return };
    assert_eq!(Policy::from_bytes(&policy.to_bytes()), Ok(policy.clone()));
    for name in ["docker.io/library/a:1", "reg.io:5000/a/b", "a"] {
        let name = Name::parse(name).expect("a name");
        let rule = policy.rule(Some(&name));
        let _ = (rule.needs(), rule.explain(), rule.to_string());
    }
});
