//! Pinned images according to PIN-1 to PIN-9: determined by names and configuration only, also after a
//! restart and SIGHUP.

use coracle_tests::cri::proto::{Image as Listed, ListImagesRequest, RemoveImageRequest};
use coracle_tests::host::wait_until;
use coracle_tests::image::Image;
use coracle_tests::node::{Node, Options};
use coracle_tests::registry::Registry;
use coracle_tests::request::{host_pod, image_spec, pull};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::find;

fn is_pinned(node: &Node, name: &str) -> bool {
    find(node, name).unwrap_or_else(|| panic!("{name} is not there")).pinned
}

fn hang_up(node: &Node) {
    kill(Pid::from_raw(node.pid()), Signal::SIGHUP).expect("the daemon is ours");
}

#[test]
fn pin_1_2_and_3_the_built_in_sandbox_image_is_always_there() {
    let mut node = Node::start();
    let only = |node: &Node| -> Listed {
        let mut images = node.list_images(ListImagesRequest::default()).expect("list").images;
        assert_eq!(images.len(), 1, "{images:?}");
        images.remove(0)
    };
    let image = only(&node);
    assert!(image.pinned && image.size > 0 && image.repo_tags.len() == 1, "{image:?}");
    for name in [&image.id, &image.repo_tags[0]] {
        assert_eq!(find(&node, name).expect("it is found").id, image.id);
    }
    // Its pull needs no registry, and an explicit removal succeeds without effect (PIN-7).
    assert_eq!(node.pull_image(pull(&image.repo_tags[0])).expect("a pull").image_ref, image.id);
    node.remove_image(RemoveImageRequest { image: Some(image_spec(&image.id)) }).expect("removed");
    assert_eq!(only(&node), image);
    node.restart();
    assert_eq!(only(&node), image);
    node.stop();
}

#[test]
fn pin_4_and_5_a_configured_sandbox_image_is_pulled_and_pinned_while_it_is_configured() {
    let fixture = Node::start();
    let registry = Registry::start(fixture.folder());
    registry.push(&Image::probe(&fixture.probe(), "pause"), "infra/pause", "1");
    registry.push(&Image::probe(&fixture.probe(), "pause two"), "infra/pause", "2");
    let (one, two) = (registry.name("infra/pause", "1"), registry.name("infra/pause", "2"));
    let line = |name: &str| format!("sandbox_image = {name:?}\n");
    let mut node = Node::with(Options { config: line(&one), ..Options::default() });
    wait_until("the sandbox image is pulled", || find(&node, &one).is_some());
    assert!(is_pinned(&node, &one));
    // A kubelet's garbage collection skips pinned images: nothing remains for it.
    let images = node.list_images(ListImagesRequest::default()).expect("list").images;
    assert!(images.iter().all(|image| image.pinned));
    // Another one: the old one is no longer pinned, the new one is pulled and pinned.
    node.rewrite_config(&line(&two));
    hang_up(&node);
    wait_until("the other is pulled", || find(&node, &two).is_some());
    assert!(is_pinned(&node, &two) && !is_pinned(&node, &one));
    node.restart();
    assert!(is_pinned(&node, &two) && !is_pinned(&node, &one));
    // None at all, and one that does not exist: pods need neither.
    node.rewrite_config(&line("127.0.0.1:1/nobody/has:1"));
    hang_up(&node);
    wait_until("it is pinned no more", || !is_pinned(&node, &two));
    node.run_pod(&host_pod("without"));
    wait_until("the log says so", || node.log().contains("cannot pull the sandbox image"));
    node.stop();
    fixture.stop();
}

#[test]
fn pin_5_6_and_7_patterns_pin_until_they_change_and_a_removal_succeeds() {
    let mut node =
        Node::with(Options { config: "pinned_images = [\"*boats*\"]\n".into(), ..Options::default() });
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "boats"), "Boats/probe".to_lowercase().as_str(), "1");
    registry.push(&Image::probe(&node.probe(), "other"), "other/probe", "1");
    let (boats, other) = (registry.name("boats/probe", "1"), registry.name("other/probe", "1"));
    for name in [&boats, &other] {
        node.pull_image(pull(name)).expect("pull");
    }
    assert!(is_pinned(&node, &boats) && !is_pinned(&node, &other));
    node.rewrite_config(&format!("pinned_images = [{other:?}]\n"));
    hang_up(&node);
    wait_until("the other is pinned", || is_pinned(&node, &other));
    assert!(!is_pinned(&node, &boats));
    // An invalid configuration changes nothing.
    node.rewrite_config("pinned_images = [\"a*b\"]\n");
    hang_up(&node);
    wait_until("the log names it", || node.log().contains("a*b"));
    assert!(is_pinned(&node, &other));
    node.rewrite_config(&format!("pinned_images = [{other:?}]\n"));
    node.restart();
    assert!(is_pinned(&node, &other) && !is_pinned(&node, &boats));
    node.remove_image(RemoveImageRequest { image: Some(image_spec(&other)) }).expect("removed");
    assert!(find(&node, &other).is_none());
    node.stop();
}

#[test]
fn pin_7_8_and_9_manual_pins_survive_restarts_and_moved_tags() {
    let mut node = Node::start();
    let registry = Registry::start(node.folder());
    registry.push(&Image::probe(&node.probe(), "old"), "app", "1");
    let name = registry.name("app", "1");
    let old = node.pull_image(pull(&name)).expect("pull").image_ref;
    let image = |words: &[&str], node: &Node| {
        let output = node.image_command(words);
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        (output.status.success(), text)
    };
    assert_eq!(image(&["pin", &name], &node), (true, format!("pinned {name}\n")));
    assert!(is_pinned(&node, &name));
    let (is_done, said) = image(&["remove", &name], &node);
    assert!(!is_done && said.contains("is pinned: use --force"), "{said}");
    node.restart();
    assert!(is_pinned(&node, &name));
    registry.push(&Image::probe(&node.probe(), "new"), "app", "1");
    let new = node.pull_image(pull(&name)).expect("pull").image_ref;
    assert_ne!(old, new);
    assert!(is_pinned(&node, &new) && !is_pinned(&node, &old), "the pin is the name's");
    // The ID pins the image itself.
    assert!(image(&["pin", &old], &node).0 && is_pinned(&node, &old));
    assert!(image(&["unpin", &old], &node).0 && !is_pinned(&node, &old));
    let (is_done, said) = image(&["unpin", &old], &node);
    assert!(!is_done && said.contains("not pinned manually"), "{said}");
    assert!(!image(&["pin", "absent"], &node).0);
    // The CRI removes a pinned image; the command line requires --force.
    assert!(image(&["remove", "--force", &name], &node).0);
    assert!(find(&node, &name).is_none());
    node.stop();
}
