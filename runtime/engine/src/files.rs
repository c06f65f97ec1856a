//! The files in /etc that all containers of a pod share: hostname, hosts, resolv.conf (CRI 4.1). They are
//! stored in the pod's directory below `--root`, so that they exist for containers that are created after a
//! restart of the daemon, and are bind-mounted.

use std::path::Path;

use coracle_base::error::{Error, failed};
use coracle_sandbox::disk;
use coracle_sandbox::hostpath::HostFile;
use coracle_sandbox::umask;
use coracle_sandbox::userns::UserMappings;
use nix::errno::Errno;

use crate::spec::{Dns, PodSpec, Sharing};

/// Maximum size in bytes of a file that is copied from the node for each pod.
const BYTES_MAX: u64 = 1 << 20;

/// Writes the three files of a pod.
pub(crate) fn write(directory: &Path, spec: &PodSpec) -> Result<(), Error> {
    let hostname = format!("{}\n", hostname(spec));
    let resolv_conf = match &spec.dns {
        Some(dns) => resolv_conf(dns).into_bytes(),
        None => copy_of("/etc/resolv.conf")?,
    };
    for (name, content) in
        [("hostname", hostname.into_bytes()), ("hosts", copy_of("/etc/hosts")?), ("resolv.conf", resolv_conf)]
    {
        let path = directory.join(name);
        let _mask = umask::Public::begin(); // every user of a container reads them
        disk::write(&path, &content).map_err(|error| failed("write", &path, &error))?;
        if let Some(mappings) = spec.user_mappings() {
            give(&path, &mappings)?;
        }
    }
    Ok(())
}

/// Changes the owner of a file or directory to root of a user namespace.
pub(crate) fn give(path: &Path, mappings: &UserMappings) -> Result<(), Error> {
    let (uid, gid) = mappings.root();
    std::os::unix::fs::lchown(path, Some(uid), Some(gid))
        .map_err(|error| failed("change owner of", path, &error))
}

/// The pod's host name; the node's host name if none was requested or the pod shares the node's network
/// namespace (and therefore its UTS namespace).
pub(crate) fn hostname(spec: &PodSpec) -> String {
    match spec.hostname.is_empty() || spec.namespaces.network == Sharing::Node {
        true => node_hostname(),
        false => spec.hostname.clone(),
    }
}

/// The node's host name.
pub fn node_hostname() -> String {
    nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn resolv_conf(dns: &Dns) -> String {
    let mut text = String::new();
    if !dns.searches.is_empty() {
        text.push_str(&format!("search {}\n", dns.searches.join(" ")));
    }
    for server in &dns.servers {
        text.push_str(&format!("nameserver {server}\n"));
    }
    if !dns.options.is_empty() {
        text.push_str(&format!("options {}\n", dns.options.join(" ")));
    }
    text
}

/// Content of a file of the node; empty if the file does not exist or is not a regular file, because reading
/// another type could block.
fn copy_of(path: &str) -> Result<Vec<u8>, Error> {
    let path = Path::new(path);
    match HostFile::open(path).and_then(|file| file.read_up_to(path, BYTES_MAX)) {
        Err(error) if error.errno() == Some(Errno::ENOENT) => Ok(Vec::new()),
        read => Ok(read?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf_has_search_servers_options_in_this_order() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let dns = Dns {
            servers: words(&["10.0.0.10", "fd00::a"]),
            searches: words(&["default.svc", "svc"]),
            options: words(&["ndots:5", "edns0"]),
        };
        let expected =
            "search default.svc svc\nnameserver 10.0.0.10\nnameserver fd00::a\noptions ndots:5 edns0\n";
        assert_eq!(resolv_conf(&dns), expected);
        assert_eq!(resolv_conf(&Dns::default()), "");
    }
}
