//! Checks whether the host's packet filter can be modified with netlink, which is the case if iptables is its
//! nftables variant. Legacy tables require the iptables program and firewalld requires D-Bus: for both the
//! plugin's program is executed, which detects the backend itself.

use std::fs;
use std::path::Path;

use super::plan::Firewall;

/// Directories of administration programs.
const PROGRAMS: [&str; 4] = ["usr/sbin", "sbin", "usr/bin", "usr/local/sbin"];
/// Name of the program to which the iptables commands of the nftables variant link.
const NFT_PROGRAM: &str = "xtables-nft-multi";
/// Files with the names of the active legacy tables, one per line.
const LEGACY_TABLES: [&str; 2] = ["proc/net/ip_tables_names", "proc/net/ip6_tables_names"];

/// Checks the host whose root directory is `root`. `Err`: the reason why the plugin's program is needed.
pub(super) fn check(root: &Path, firewall: Firewall) -> Result<(), String> {
    for path in LEGACY_TABLES {
        let names = fs::read_to_string(root.join(path)).unwrap_or_default();
        if names.lines().any(|name| name == "filter") {
            return Err(format!("/{path} lists a filter table of legacy iptables"));
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
    fn the_filter_is_supported_if_iptables_uses_nftables() {
        let folder = Folder::new("filter");
        let root = folder.0.join("root");
        let check = |prefers_firewalld| check(&root, Firewall { prefers_firewalld });
        fs::create_dir_all(root.join("usr/sbin")).unwrap();
        fs::create_dir_all(root.join("proc/net")).unwrap();
        assert_eq!(check(true), Ok(()), "a host without packet filter programs");
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
        assert_eq!(check(true), Ok(()), "a legacy table other than filter");
        fs::write(root.join("usr/sbin/firewalld"), "").unwrap();
        assert_eq!(check(true), Err("firewalld is installed".to_owned()));
        assert_eq!(check(false), Ok(()), "the list requires iptables");
        fs::write(root.join("proc/net/ip_tables_names"), "nat\nfilter\n").unwrap();
        assert_eq!(
            check(false),
            Err("/proc/net/ip_tables_names lists a filter table of legacy iptables".to_owned())
        );
    }
}
