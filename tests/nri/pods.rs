//! The pod sandbox contract: NRI-S1 to NRI-S38.

use coracle_tests::node::Node;
use coracle_tests::nri::Plugin;
use coracle_tests::request::{container, host_pod};

#[test]
fn nri_s28_c1_c2_events_come_in_order() {
    let node = Node::start();
    let image = node.import_probe();
    let plugin = Plugin::listener(&node, "10", "order");
    let pod = host_pod("web");
    let pod_id = node.run_pod(&pod);
    let id = node.run_container(&pod_id, &container("c1", &image, &["sleep", "60"], &pod), &pod);
    node.remove_pod(&pod_id);
    let expected = [
        "RunPodSandbox web",
        "CreateContainer c1",
        "PostCreateContainer c1",
        "StartContainer c1",
        "PostStartContainer c1",
        "StopContainer c1",
        "StopPodSandbox web",
        "RemoveContainer c1",
        "RemovePodSandbox web",
    ];
    assert_eq!(plugin.titles(), expected);
    for heard in plugin.all().iter().filter(|heard| heard.method.ends_with("Container")) {
        let told = heard.container();
        assert_eq!((told.id.as_str(), told.name.as_str()), (id.as_str(), "c1"), "{}", heard.method);
        assert_eq!(told.pod_sandbox_id, pod_id, "{}", heard.method);
    }
    node.stop();
}
