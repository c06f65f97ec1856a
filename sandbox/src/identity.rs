//! Resolves the user, group and supplementary groups of a container's process with `passwd` and `group` of the
//! container's root file system. The module does no I/O: the caller reads the files (inside the root, with a size
//! limit) and passes untrusted bytes. Malformed lines are skipped, and the bytes need not be valid UTF-8. Rules: CRI
//! 3.9; KEP-3619 for the two group policies.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::Error;

/// User and groups of a process, as ids in the container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary groups, sorted and without duplicates; they include the primary group.
    pub groups: Vec<u32>,
}

/// Additional groups of a process (CRI `SupplementalGroupsPolicy`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GroupPolicy {
    /// Adds the groups that the image's `/etc/group` lists for the user.
    #[default]
    Merge,
    /// Only the requested groups.
    Strict,
}

/// Values of the CRI request and the image. Numbers are validated here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// User ID, the CRI's `run_as_user`; `None`: not set.
    pub user: Option<i64>,
    /// User name, the CRI's `run_as_username`; empty: not set. Used if `user` is not set.
    pub user_name: String,
    /// Group ID, the CRI's `run_as_group`, requires `user` or `user_name`; `None`: not set.
    pub group: Option<i64>,
    /// Group IDs, the CRI's `supplemental_groups`.
    pub supplemental_groups: Vec<i64>,
    /// The CRI's `supplemental_groups_policy`.
    pub policy: GroupPolicy,
    /// The image configuration's `User`: empty, `name`, `id`, `name:group` and so on.
    pub image_user: String,
}

/// An identity and the home directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// User and groups of the process.
    pub identity: Identity,
    /// Home directory, for `HOME` if the environment does not set it: that in `passwd`, which may be empty (runc), or `/` if the
    /// user is not in it.
    pub home: Vec<u8>,
}

/// Maximum size of `passwd` and `group` in bytes: a file with 60 000 users has about 4 MiB.
pub const FILE_BYTES_MAX: usize = 4 << 20;

/// Largest ID of a user, and of a primary group, in a request or an image (Kubernetes' `IsValidUserID`, and containerd's
/// `WithUser`).
pub const ID_MAX: u32 = i32::MAX as u32;

/// Maximum number of supplementary groups of a process (`NGROUPS_MAX` since Linux 2.6.4).
const GROUPS_MAX: usize = 65_536;

/// Resolves the identity. `passwd` and `group` are the files' content; empty for missing files.
///
/// # Errors
/// [`Error::Invalid`]: an unknown name, a group without a user, a number out of range, too many groups.
pub fn resolve(request: &Request, passwd: &[u8], group: &[u8]) -> Result<Resolved, Error> {
    for (name, text) in [("/etc/passwd", passwd), ("/etc/group", group)] {
        if text.len() > FILE_BYTES_MAX {
            return Err(Error::invalid(name, format!("is longer than {FILE_BYTES_MAX} bytes")));
        }
    }
    let (image_name, image_group) = match request.image_user.split_once(':') {
        Some((name, group)) => (name, group),
        None => (request.image_user.as_str(), ""),
    };
    let is_images_user = request.user.is_none() && request.user_name.is_empty();
    let user = match request.user {
        Some(uid) => User::of_uid(checked_id("run_as_user", uid, ID_MAX)?, passwd),
        None if !request.user_name.is_empty() => {
            User::of_text("run_as_username", &request.user_name, passwd)?
        }
        None if !image_name.is_empty() => User::of_text("user of the image", image_name, passwd)?,
        // containerd does not look it up, so that the line of a user 0 gives no other group.
        None => User { gid: 0, ..User::of_uid(0, passwd) },
    };
    let gid = match request.group {
        Some(_) if is_images_user => {
            return Err(Error::invalid("run_as_group", "is set without run_as_user or run_as_username"));
        }
        Some(gid) => checked_id("run_as_group", gid, ID_MAX)?,
        None if is_images_user && !image_group.is_empty() => gid_of_text(image_group, group)?,
        None => user.gid,
    };
    let groups = groups_of(request, &user, gid, group)?;
    Ok(Resolved { identity: Identity { uid: user.uid, gid, groups }, home: user.home.to_vec() })
}

fn groups_of(request: &Request, user: &User<'_>, gid: u32, group: &[u8]) -> Result<Vec<u32>, Error> {
    let mut groups = BTreeSet::from([gid]);
    for id in &request.supplemental_groups {
        groups.insert(checked_id("supplemental_groups", *id, u32::MAX - 1)?);
    }
    if request.policy == GroupPolicy::Merge && !user.name.is_empty() {
        // Not the user's own group, as in containerd (`WithAdditionalGIDs`).
        groups.extend(
            group_lines(group)
                .filter(|line| line.name != user.name)
                .filter(|line| line.members.split(|b| *b == b',').any(|m| m == user.name))
                .map(|l| l.gid),
        );
    }
    if groups.len() > GROUPS_MAX {
        return Err(Error::invalid(
            "supplemental_groups",
            format!("are {}, at most {GROUPS_MAX}", groups.len()),
        ));
    }
    Ok(groups.into_iter().collect())
}

/// A user; the name is empty if `passwd` does not have it.
struct User<'a> {
    name: &'a [u8],
    uid: u32,
    gid: u32,
    home: &'a [u8],
}

impl<'a> User<'a> {
    fn of_uid(uid: u32, passwd: &'a [u8]) -> Self {
        let unknown = User { name: b"", uid, gid: 0, home: b"/" };
        passwd_lines(passwd).find(|user| user.uid == uid).unwrap_or(unknown)
    }

    /// Finds a user by the text of a request: a number is always an ID, as in other runtimes, so that a line of the
    /// image's file cannot give a number another meaning; anything else is a name.
    fn of_text(field: &str, text: &str, passwd: &'a [u8]) -> Result<Self, Error> {
        if is_number(text.as_bytes()) {
            return Ok(Self::of_uid(id_in_text(field, text)?, passwd));
        }
        passwd_lines(passwd)
            .find(|user| user.name == text.as_bytes())
            .ok_or_else(|| Error::invalid(field, format!("no user {text:?} in the container's /etc/passwd")))
    }
}

fn gid_of_text(text: &str, group: &[u8]) -> Result<u32, Error> {
    let field = "group of the image's user";
    if is_number(text.as_bytes()) {
        return id_in_text(field, text);
    }
    let found = group_lines(group).find(|line| line.name == text.as_bytes());
    let unknown = || Error::invalid(field, format!("no group {text:?} in the container's /etc/group"));
    found.map(|line| line.gid).ok_or_else(unknown)
}

fn id_in_text(field: &str, text: &str) -> Result<u32, Error> {
    checked_id(field, text.parse().unwrap_or(i64::MAX), ID_MAX)
}

/// Parses lines `name:password:uid:gid:comment:home:shell` that are complete up to the home directory.
fn passwd_lines(text: &[u8]) -> impl Iterator<Item = User<'_>> {
    lines(text).filter_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let uid = parse_id(fields.nth(1)?)?;
        let gid = parse_id(fields.next()?)?;
        let home = fields.nth(1).unwrap_or_default();
        Some(User { name, uid, gid, home })
    })
}

struct Group<'a> {
    name: &'a [u8],
    gid: u32,
    members: &'a [u8],
}

/// Parses lines `name:password:gid:member,member`.
fn group_lines(text: &[u8]) -> impl Iterator<Item = Group<'_>> {
    lines(text).filter_map(|line| {
        let mut fields = line.split(|byte| *byte == b':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let gid = parse_id(fields.nth(1)?)?;
        Some(Group { name, gid, members: fields.next().unwrap_or_default() })
    })
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii)
}

/// Whether a text is a decimal number, which may have a sign (Go's strconv.Atoi, by which containerd distinguishes numbers from
/// names).
fn is_number(text: &[u8]) -> bool {
    is_digits(text.strip_prefix(b"+").or_else(|| text.strip_prefix(b"-")).unwrap_or(text))
}

fn is_digits(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(u8::is_ascii_digit)
}

/// Parses a decimal ID of a file. The largest 32-bit number is not an ID: it means "no change" in system calls.
fn parse_id(text: &[u8]) -> Option<u32> {
    let id = std::str::from_utf8(text).ok().filter(|_| is_digits(text))?.parse().ok()?;
    (id != u32::MAX).then_some(id)
}

fn checked_id(field: &str, id: i64, max: u32) -> Result<u32, Error> {
    let fits = u32::try_from(id).ok().filter(|id| *id <= max);
    fits.ok_or_else(|| Error::invalid(field, format!("{id} is not between 0 and {max}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/sh\n\
        # a comment\n\
        broken:x:nine:0::/:\n\
        :x:7:7::/:\n\
        short:x:5\n\
        default-user:x:1000:1000::/home/user:/bin/sh\r\n\
        1234:x:0:0::/seven:\n\
        \x20 indented:x:40:41::/indented:\n\
        homeless:x:30:31\n\
        huge:x:4294967295:0::/:\n";
    const GROUP: &[u8] = b"root:x:0:root\n\
        user:x:1000:\n\
        extra:x:50000:other,default-user\n\
        prefix:x:50001:default-user2\n\
        bad:x:-1:default-user\n\
        1234:x:0:\n\
        staff:x:50:homeless,root\n";

    fn request(change: impl FnOnce(&mut Request)) -> Request {
        let mut request = Request::default();
        change(&mut request);
        request
    }

    fn identity(uid: u32, gid: u32, groups: &[u32]) -> Identity {
        Identity { uid, gid, groups: groups.to_vec() }
    }

    #[test]
    fn users_are_resolved_in_every_form_of_a_request_and_an_image() {
        let table: [(Request, Identity, &[u8]); 18] = [
            (Request::default(), identity(0, 0, &[0, 50]), b"/root"),
            (request(|r| r.user = Some(1000)), identity(1000, 1000, &[1000, 50000]), b"/home/user"),
            (request(|r| r.user = Some(4242)), identity(4242, 0, &[0]), b"/"),
            (request(|r| r.user_name = "homeless".into()), identity(30, 31, &[31, 50]), b""),
            (request(|r| r.image_user = "+1000:+50".into()), identity(1000, 50, &[50, 50000]), b"/home/user"),
            (request(|r| r.image_user = "2147483647".into()), identity(2_147_483_647, 0, &[0]), b"/"),
            // Digits are a number, also if a line has them as its name.
            (request(|r| r.user_name = "1234".into()), identity(1234, 0, &[0]), b"/"),
            (request(|r| r.image_user = "1234:1234".into()), identity(1234, 1234, &[1234]), b"/"),
            (request(|r| r.image_user = "indented".into()), identity(40, 41, &[41]), b"/indented"),
            (request(|r| r.user_name = "1000".into()), identity(1000, 1000, &[1000, 50000]), b"/home/user"),
            (
                request(|r| r.image_user = "default-user".into()),
                identity(1000, 1000, &[1000, 50000]),
                b"/home/user",
            ),
            (request(|r| r.image_user = "1000:50".into()), identity(1000, 50, &[50, 50000]), b"/home/user"),
            (
                request(|r| r.image_user = "default-user:staff".into()),
                identity(1000, 50, &[50, 50000]),
                b"/home/user",
            ),
            (request(|r| r.image_user = "9:9".into()), identity(9, 9, &[9]), b"/"),
            (request(|r| r.image_user = ":staff".into()), identity(0, 50, &[50]), b"/root"),
            // The image's group belongs to the image's user only.
            (
                request(|r| {
                    r.user = Some(1000);
                    r.image_user = "root:staff".into();
                }),
                identity(1000, 1000, &[1000, 50000]),
                b"/home/user",
            ),
            // run_as_user wins over run_as_username; the groups asked for and the primary one are always in.
            (
                request(|r| {
                    r.user = Some(1000);
                    r.user_name = "root".into();
                    r.group = Some(3);
                    r.supplemental_groups = vec![1234, 1234];
                }),
                identity(1000, 3, &[3, 1234, 50000]),
                b"/home/user",
            ),
            (
                request(|r| {
                    r.user = Some(1000);
                    r.supplemental_groups = vec![1234];
                    r.policy = GroupPolicy::Strict;
                }),
                identity(1000, 1000, &[1000, 1234]),
                b"/home/user",
            ),
        ];
        for (request, identity, home) in table {
            let expected = Resolved { identity, home: home.to_vec() };
            assert_eq!(resolve(&request, PASSWD, GROUP), Ok(expected), "{request:?}");
        }
    }

    #[test]
    fn errors_of_users_that_cannot_be_resolved_name_the_field() {
        let table = [
            (request(|r| r.user_name = "nobody".into()), "run_as_username"),
            (request(|r| r.image_user = "broken".into()), "user of the image"),
            (request(|r| r.image_user = "2147483648".into()), "user of the image"),
            (request(|r| r.image_user = "-1".into()), "user of the image"),
            (request(|r| r.user_name = "-1000".into()), "run_as_username"),
            (request(|r| r.image_user = "0:99999999999".into()), "group of the image's user"),
            (request(|r| r.image_user = "root:nogroup".into()), "group of the image's user"),
            (request(|r| r.group = Some(5)), "run_as_group"),
            (request(|r| (r.group, r.image_user) = (Some(5), "root".into())), "run_as_group"),
            (request(|r| r.user = Some(-1)), "run_as_user"),
            (request(|r| r.user = Some(1 << 31)), "run_as_user"),
            (request(|r| (r.user, r.group) = (Some(5), Some(1 << 31))), "run_as_group"),
            (request(|r| r.supplemental_groups = vec![i64::from(u32::MAX)]), "supplemental_groups"),
            (request(|r| r.supplemental_groups = vec![1 << 40]), "supplemental_groups"),
            (request(|r| r.supplemental_groups = (0..70_000).collect()), "supplemental_groups"),
        ];
        for (request, expected) in table {
            match resolve(&request, PASSWD, GROUP) {
                Err(Error::Invalid { field, .. }) => assert_eq!(field, expected),
                other => panic!("{expected}: {other:?}"),
            }
        }
        let long = vec![b'a'; FILE_BYTES_MAX + 1];
        assert!(resolve(&Request::default(), &long, b"").is_err());
    }

    #[test]
    fn files_that_are_missing_are_fine_for_numbers() {
        let other_root = resolve(&Request::default(), b"a:x:0:7::/a:/x\n", b"").unwrap();
        assert_eq!((other_root.identity, other_root.home), (identity(0, 0, &[0]), b"/a".to_vec()));
        let own_group = request(|r| r.image_user = "a".into());
        let own_group = resolve(&own_group, b"a:x:5:7::/:/x\n", b"a:x:6:a\nb:x:8:a\n").unwrap();
        assert_eq!(own_group.identity, identity(5, 7, &[7, 8]));
        let request = request(|r| r.image_user = "1000".into());
        let expected = Resolved { identity: identity(1000, 0, &[0]), home: b"/".to_vec() };
        assert_eq!(resolve(&request, b"", b""), Ok(expected));
    }

    /// For any content of the files, the result is valid.
    #[test]
    fn random_user_files_give_valid_identities() {
        const ALPHABET: &[u8] = b":\n,0123456789aroot\r\0\xff";
        let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
        for round in 0..2_000 {
            let mut text = Vec::new();
            for _ in 0..round % 120 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                text.push(ALPHABET[(seed >> 33) as usize % ALPHABET.len()]);
            }
            let request = request(|r| {
                r.user = Some(1);
                r.supplemental_groups = vec![9, 4];
            });
            let resolved = resolve(&request, &text, &text).expect("numbers always resolve");
            let groups = &resolved.identity.groups;
            assert!(
                groups.is_sorted() && groups.contains(&resolved.identity.gid) && groups.contains(&9),
                "{text:?}"
            );
            assert!(!resolved.home.contains(&b'\n'), "{text:?}");
        }
    }
}
