//! The images of the containerd that the node used before. A step of `enable` takes them over, and `--dry-run` lists them; the
//! reader of containerd's store is a program of its own, which the caller of this crate starts.

use std::path::Path;

use serde_json::{Value, json};

use crate::host::Host;
use crate::plan::Wanted;
use crate::report;

/// The metadata below containerd's root directory.
const METADATA: &str = "io.containerd.metadata.v1.bolt/meta.db";
/// containerd's configuration.
const CONFIG: &str = "/etc/containerd/config.toml";
/// containerd's root directory without a configuration.
const ROOT: &str = "/var/lib/containerd";

/// An image of the old containerd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OldImage {
    /// A name of the image.
    pub name: String,
    /// Compressed size of the image in bytes, or the reason why it cannot be taken over.
    pub size_bytes: Result<u64, String>,
}

/// Lists the images in the store of a containerd, whose root directory is the argument; the error is one line.
pub type List<'a> = &'a dyn Fn(&Path) -> Result<Vec<OldImage>, String>;

/// Adds the store of the old containerd, if there is one and its images are wanted.
pub(crate) fn collect(host: &Host, store: &str, wanted: &mut Wanted) {
    if wanted.takes_images && host.is_file(&format!("{store}/{METADATA}")) {
        wanted.old_store = Some(store.to_owned());
    }
}

/// The root directory of a containerd with a configuration of its own: the value of `root` in front of the first table.
pub(crate) fn root_of_containerd(host: &Host) -> String {
    let text = host.read(CONFIG).ok().flatten().unwrap_or_default();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with('['));
    let mut values = lines.filter_map(|line| line.strip_prefix("root")?.trim_start().strip_prefix('='));
    let root = values.find_map(|value| {
        let value = value.trim();
        let quote = value.chars().next().filter(|quote| matches!(quote, '"' | '\''))?;
        let (root, _) = value.get(1..)?.split_once(quote)?;
        root.starts_with('/').then(|| root.trim_end_matches('/').to_owned())
    });
    root.unwrap_or_else(|| ROOT.to_owned())
}

/// The step that takes the images over, once coracle runs; none without such a store.
pub(crate) fn step(wanted: &Wanted) -> Option<String> {
    let store = wanted.old_store.as_ref()?;
    Some(format!("coracle image take-over --from {}", quoted(store)))
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "/._-+".contains(letter);
    match word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// The images of the old containerd, or one line if they cannot be listed.
pub(crate) fn list(host: &Host, wanted: &Wanted, list: List<'_>) -> Result<Vec<OldImage>, String> {
    let Some(store) = &wanted.old_store else { return Ok(Vec::new()) };
    let directory = host.directory_of(store).map_err(|problem| problem.0)?;
    list(&directory.path()).map_err(|why| format!("{store}: its images cannot be listed: {why}"))
}

/// The text about the images.
pub(crate) fn text(images: &[OldImage]) -> String {
    let (mut taken, mut left) = (Vec::new(), Vec::new());
    for image in images {
        match &image.size_bytes {
            Ok(bytes) => {
                taken.push(format!("{}  {}.{} MB", image.name, bytes / 1_000_000, bytes / 100_000 % 10))
            }
            Err(why) => left.push(format!("{}: {why}", image.name)),
        }
    }
    report::list("images that `coracle image take-over` imports", &taken)
        + &report::list("images that are pulled again", &left)
}

/// The images for programs.
pub(crate) fn json(images: &[OldImage]) -> Value {
    let one = |image: &OldImage| {
        json!({
            "name": image.name,
            "size_bytes": image.size_bytes.as_ref().ok(),
            "problem": image.size_bytes.as_ref().err(),
        })
    };
    images.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_directory_is_that_of_the_configuration() {
        let root = std::env::temp_dir().join(format!("coracle-old-images-{}", std::process::id()));
        std::fs::create_dir_all(root.join("etc/containerd")).unwrap();
        let host = Host::open(&root).unwrap();
        for (text, expected) in [
            ("", ROOT),
            ("version = 3\nroot = '/data/containerd/'\n", "/data/containerd"),
            ("root=\"/a b\" # here\n[x]\n", "/a b"),
            ("[plugins]\nroot = \"/x\"\n", ROOT),
            ("root = relative\nrootless = '/x'\n", ROOT),
            ("root = \"\n", ROOT),
            ("root = \u{e9}\n", ROOT),
        ] {
            std::fs::write(root.join("etc/containerd/config.toml"), text).unwrap();
            assert_eq!(root_of_containerd(&host), expected, "{text}");
        }
        std::fs::remove_dir_all(&root).unwrap();
    }

    #[test]
    fn arguments_of_steps_are_quoted_for_a_shell() {
        let step = |store: &str| step(&Wanted { old_store: Some(store.to_owned()), ..Wanted::default() });
        assert_eq!(step("/a/b").unwrap(), "coracle image take-over --from /a/b");
        assert_eq!(step("/a 'b'").unwrap(), r"coracle image take-over --from '/a '\''b'\'''");
    }
}
