//! Whether the host's filter is one that we can write: that of iptables where it is nftables. The legacy tables are written
//! by a program of their own, and firewalld is spoken to over D-Bus: for both there is the plugin's program, which finds out
//! itself what to do.

use std::fs;
use std::path::Path;

use super::conf::Firewall;

/// Where programs of administrators are.
const PROGRAMS: [&str; 4] = ["usr/sbin", "sbin", "usr/bin", "usr/local/sbin"];
/// The program that all commands of iptables are which write nftables.
const NFT_PROGRAM: &str = "xtables-nft-multi";
/// Names of the legacy tables that there are, one in a line.
const LEGACY_TABLES: [&str; 2] = ["proc/net/ip_tables_names", "proc/net/ip6_tables_names"];

/// Looks at the host whose files are in `root`. `Err`: why it is the program's business.
pub(super) fn check(root: &Path, firewall: Firewall) -> Result<(), String> {
    for path in LEGACY_TABLES {
        let names = fs::read_to_string(root.join(path)).unwrap_or_default();
        if names.lines().any(|name| name == "filter") {
            return Err(format!("/{path} has a filter of legacy iptables"));
        }
    }
    let find = |program: &str| {
        PROGRAMS.iter().map(|folder| root.join(folder).join(program)).find(|path| path.exists())
    };
    if firewall.prefers_firewalld && find("firewalld").is_some() {
        return Err("firewalld is installed".to_owned());
    }
    let Some(iptables) = find("iptables") else { return Ok(()) };
    let target = fs::canonicalize(&iptables).unwrap_or(iptables);
    match target.file_name().is_some_and(|name| name == NFT_PROGRAM) {
        true => Ok(()),
        false => Err(format!("iptables is {}, not {NFT_PROGRAM}", target.display())),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::tests::Folder;

    #[test]
    fn the_filter_is_ours_where_iptables_is_nftables() {
        let folder = Folder::new("filter");
        let root = folder.0.join("root");
        let check = |prefers_firewalld| check(&root, Firewall { prefers_firewalld });
        fs::create_dir_all(root.join("usr/sbin")).unwrap();
        fs::create_dir_all(root.join("proc/net")).unwrap();
        assert_eq!(check(true), Ok(()), "a host without any of them");
        let iptables = root.join("usr/sbin/iptables");
        for (program, is_ours) in
            [("xtables-nft-multi", true), ("xtables-legacy-multi", false), ("xtables-multi", false)]
        {
            fs::write(root.join("usr/sbin").join(program), "").unwrap();
            symlink(root.join("usr/sbin").join(program), root.join("usr/sbin/iptables-there")).unwrap();
            symlink("iptables-there", &iptables).unwrap();
            assert_eq!(check(true).is_ok(), is_ours, "{program}: {:?}", check(true));
            fs::remove_file(&iptables).unwrap();
            fs::remove_file(root.join("usr/sbin/iptables-there")).unwrap();
        }
        fs::write(root.join("proc/net/ip_tables_names"), "nat\n").unwrap();
        assert_eq!(check(true), Ok(()), "a legacy table that is no filter");
        fs::write(root.join("usr/sbin/firewalld"), "").unwrap();
        assert_eq!(check(true), Err("firewalld is installed".to_owned()));
        assert_eq!(check(false), Ok(()), "the list names iptables");
        fs::write(root.join("proc/net/ip_tables_names"), "nat\nfilter\n").unwrap();
        assert_eq!(check(false), Err("/proc/net/ip_tables_names has a filter of legacy iptables".to_owned()));
    }
}
