//! What `coracle k3s enable` reads of k3s' services, of systemd and OpenRC, and the commands that it prints.

use std::fs;

use super::{K3S_DROP_IN, K3S_TOML, Tree, there_and_back};

/// Options in a service of OpenRC, in the form that k3s' installer writes.
#[test]
fn a_service_of_openrc_is_read_like_a_unit() {
    let script = |more: &str| {
        format!(
            "#!/sbin/openrc-run\n\ndepend() {{\n    after network-online\n    want cgroups\n}}\n\nsupervisor=supervise-daemon\nname=k3s\n\
             command=\"/usr/local/bin/k3s\"\ncommand_args=\"server \\\n{more}\n    >>/var/log/k3s.log 2>&1\"\n\n\
             output_log=/var/log/k3s.log\nset -o allexport\nif [ -f /etc/environment ]; then . /etc/environment; fi\n\
             if [ -f /etc/rancher/k3s/k3s.env ]; then . /etc/rancher/k3s/k3s.env; fi\nset +o allexport\n"
        )
    };
    let tree = |test: &str, more: &str| {
        let tree = Tree::new(test, "k3s", "1.36");
        fs::remove_dir_all(tree.path("etc/systemd")).expect("systemd's files");
        tree.write("etc/init.d/k3s", &script(more));
        tree
    };
    for (more, expected) in [
        ("\t'--docker' \\\n", "init.d/k3s: docker selects"),
        (
            "\t'--container-runtime-endpoint' \\\n\t'/run/x.sock' \\\n",
            "init.d/k3s: container-runtime-endpoint is /run/x.sock",
        ),
    ] {
        tree("openrc-refused", more).refuses(&["enable"], expected);
    }
    let tree = tree("openrc", "\t'--data-dir' \\\n\t'/mnt/k3s' \\\n");
    tree.write("etc/rancher/k3s/k3s.env", "K3S_CONFIG_FILE='/opt/k.yaml'\n");
    let before = tree.entries();
    let text = tree.succeeds(&["enable"]);
    assert!(tree.read(K3S_TOML).contains("conf_dir = \"/mnt/k3s/agent/etc/cni/net.d\""));
    assert!(tree.path("opt/k.yaml.d/50-coracle.yaml").exists() && !tree.path(K3S_DROP_IN).exists());
    assert!(!text.contains("systemctl") && text.contains("rc-service k3s restart"), "{text}");
    let text = tree.succeeds(&["disable"]);
    let at = |step: &str| text.find(step).unwrap_or_else(|| panic!("{step}: {text}"));
    assert!(at("rc-service k3s stop") < at("crictl rmp --all --force"), "{text}");
    assert!(at("crictl rmp --all --force") < at("rc-update del coracle"), "{text}");
    assert!(at("rc-update del coracle") < at("rc-service k3s start"), "{text}");
    assert!(tree.entries() == before, "not restored");
}

#[test]
fn k3s_variables_and_a_network_of_ones_own_are_followed() {
    let lists = "conf_dir = \"/mnt/k3s/agent/etc/cni/net.d\"";
    for (name, text, expected, other) in [
        ("etc/default/k3s", "K3S_DATA_DIR='/mnt/k3s'\n", lists, "/var/lib/rancher"),
        ("etc/systemd/system/k3s.service.env", "K3S_DATA_DIR='/mnt/k3s'\n", lists, "/var/lib/rancher"),
        // Another CNI plugin: the directories are containerd's and coracle's defaults.
        ("etc/rancher/k3s/config.yaml", "flannel-backend: none\n", "[registry]", "[cni]"),
        // Of a server, which shows its own option: the list of another program.
        ("etc/cni/net.d/87-podman.conflist", "{}", "[cni]", "/mnt"),
        (
            "etc/rancher/k3s/config.yaml",
            "disable-default-registry-endpoint: true\n",
            "config = \"/etc/rancher/k3s/registries.yaml\"\ndefault_endpoint = false\n",
            "/mnt",
        ),
    ] {
        let tree = Tree::new("followed", "k3s", "1.36");
        tree.write(name, text);
        there_and_back(&tree, |tree| {
            let toml = tree.read(K3S_TOML);
            assert!(toml.contains(expected) && !toml.contains(other), "{name} {text}: {toml}");
        });
    }
    let tree = Tree::new("agent", "k3s", "1.36");
    fs::remove_file(tree.path("etc/systemd/system/k3s.service")).expect("the unit");
    tree.write("usr/lib/systemd/system/k3s-agent.service", "[Service]\nExecStart=/usr/local/bin/k3s agent\n");
    let text = tree.succeeds(&["enable"]);
    assert!(text.contains("repeat `coracle k3s enable`") && tree.read(K3S_TOML).contains("[cni]"), "{text}");
    tree.write("etc/cni/net.d/05-cilium.conflist", "{}");
    assert!(tree.succeeds(&["enable"]).contains("k3s.toml") && !tree.read(K3S_TOML).contains("[cni]"));
    tree.write("var/lib/rancher/k3s/agent/etc/cni/net.d/10-flannel.conflist", "{}");
    assert!(tree.succeeds(&["enable"]).contains("k3s.toml") && tree.read(K3S_TOML).contains("[cni]"));
    let tree = Tree::new("stop-first", "k3s", "1.36");
    tree.succeeds(&["enable"]);
    let text = tree.succeeds(&["disable"]);
    let at = |step: &str| text.find(step).unwrap_or_else(|| panic!("{step}: {text}"));
    assert!(at("systemctl stop k3s") < at("crictl rmp --all --force"), "{text}");
    assert!(at("systemctl disable --now coracle") < at("systemctl start k3s"), "{text}");
}
