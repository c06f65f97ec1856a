//! The configuration file of a test node: the node's own paths, and additions of a test, also to the same
//! sections.

use std::path::Path;

use crate::host;

/// The complete file; `more` may have top-level keys and sections, including existing ones.
pub(crate) fn text(more: &str, folder: &Path) -> String {
    let folder = folder.display();
    let driver = if host::has_systemd_driver() { "systemd" } else { "cgroupfs" };
    let own = [
        ("[cgroup]\n", format!("driver = \"{driver}\"\n")),
        ("[cni]\n", format!("bin_dirs = [\"{folder}/plugins\", \"/opt/cni/bin\", \"/usr/lib/cni\"]\n")),
        (
            "[registry]\n",
            format!("config = \"{folder}/registries.yaml\"\ncerts_dir = \"{folder}/certs.d\"\n"),
        ),
        ("[image]\n", format!("import_dir = \"{folder}/import\"\n")),
        (
            "[nri]\n",
            format!(
                "socket_path = \"{folder}/nri.sock\"\nplugin_path = \"{folder}/nri\"\nplugin_config_path = \"{folder}/nri.d\"\n"
            ),
        ),
    ];
    own.iter().fold(format!("{more}\n"), |text, (heading, keys)| match text.contains(heading) {
        true => text.replacen(heading, &format!("{heading}{keys}"), 1),
        false => format!("{text}{heading}{keys}"),
    })
}
