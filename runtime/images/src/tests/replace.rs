//! Damaged layers that are replaced, and what is known of damage.

use std::fs;

use super::*;

#[test]
fn a_replaced_layer_stays_while_its_users_are_there_or_not_known() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.pull(&images, &record, TAG).await.unwrap();
        let name = record.layers[0].name.as_str();
        let layer = name.parse().unwrap();
        let container = ContainerId::from_bytes([1; 32]);
        images.retain(container, [name]).unwrap();
        let (new, old) = (node.root().join("layers/tmp-new"), node.root().join("replaced/0"));
        fs::create_dir(&new).unwrap();
        fs::write(new.join("new"), b"").unwrap();
        images.keep_everything(true);
        assert!(images.replace(&layer, &new).is_err() && new.is_dir() && !old.exists());
        images.keep_everything(false);
        images.replace(&layer, &new).unwrap();
        assert!(node.layer('a').join("new").exists() && old.join("layer").is_dir());

        // The record of the users is lost.
        fs::remove_file(old.join("users")).unwrap();
        let images = node.open();
        images.retain(container, [name]).unwrap();
        images.sweep();
        assert!(old.join("layer").is_dir());
        images.release(&container);
        assert!(!old.exists() && node.layer('a').join("new").exists());

        // A layer that is not used does not come back.
        images.remove(&record.id).unwrap();
        fs::create_dir(&new).unwrap();
        assert!(images.replace(&layer, &new).is_err() && !node.layer('a').exists());
    });
}

#[test]
fn damage_is_known_after_a_start_until_a_pull_replaces_the_layer() {
    let node = Node::new();
    reactor::run(async {
        let images = node.open();
        let record = node.whole('a', &[TAG]);
        node.pull(&images, &record, TAG).await.unwrap();
        let note = node.root().join("images/damage").join(&record.layers[0].name);
        fs::write(&note, "/srv: has other content").unwrap();
        let images = node.open();
        let (count, text) = images.damaged();
        let text = text.unwrap();
        assert!(count == 1 && text.contains(TAG) && text.contains("/srv: has other content"), "{text}");
        node.pull(&images, &record, TAG).await.unwrap();
        assert_eq!(images.damaged().0, 1, "the layer was there");
        // As a worker does that makes the layer.
        fs::remove_file(&note).unwrap();
        node.pull(&images, &record, TAG).await.unwrap();
        assert_eq!(images.damaged(), (0, None));
    });
}
