//! Finds the container that a user has named: by a prefix of its ID, by its name, or by its name with the
//! names of its pod and namespace in front. The module does no I/O.

use coracle_control::Container;

/// Minimum length of a prefix of an ID.
const ID_DIGITS_MIN: usize = 3;

/// Finds a container among `containers`, newest first. If a container has several attempts, the newest one is
/// found.
///
/// # Errors
/// No container has this name, or several have; the text lists them.
pub(crate) fn container<'a>(wanted: &str, containers: &'a [Container]) -> Result<&'a Container, String> {
    let is_digits = wanted.len() >= ID_DIGITS_MIN && wanted.bytes().all(|byte| byte.is_ascii_hexdigit());
    // A name may be the start of another container's ID: that is an ambiguity, not a preference.
    let is_wanted = |one: &&Container| is_digits && one.id.starts_with(wanted) || is_called(one, wanted);
    let mut found: Vec<_> = containers.iter().filter(is_wanted).collect();
    let newest =
        *found.first().ok_or_else(|| format!("no container is called {wanted}, and no ID starts so"))?;
    // Earlier attempts give way to the newest one, unless the ID says which.
    found.retain(|one| one.id == newest.id || title(one) != title(newest) || one.attempt > newest.attempt);
    match found.as_slice() {
        [_] => Ok(newest),
        several => {
            let several = several.iter().map(|one| format!("{:.13} ({}, {})", one.id, title(one), one.state));
            Err(format!("several containers are called {wanted}: {}", several.collect::<Vec<_>>().join(", ")))
        }
    }
}

/// Formats namespace, pod and container, separated by slashes.
fn title(container: &Container) -> String {
    format!("{}/{}/{}", container.namespace, container.pod_name, container.name)
}

fn is_called(container: &Container, wanted: &str) -> bool {
    let title = title(container);
    let of_pod = title.strip_prefix(&container.namespace).and_then(|rest| rest.strip_prefix('/'));
    !wanted.is_empty() && (wanted == title || Some(wanted) == of_pod || wanted == container.name)
}

#[cfg(test)]
mod tests {
    use super::container;
    use coracle_control::Container;

    fn one(id: &str, title: &str, attempt: u32) -> Container {
        let mut words = title.split('/').map(str::to_owned);
        let mut next = || words.next().unwrap();
        Container {
            id: id.into(),
            namespace: next(),
            pod_name: next(),
            name: next(),
            attempt,
            state: "running".into(),
            ..Container::default()
        }
    }

    #[test]
    fn names_and_ids_lead_to_one_container_or_to_an_error() {
        let all = [
            one("aa11", "default/web/app", 1),
            one("aa22", "default/web/app", 0),
            one("bb33", "default/db/sql", 0),
            one("cc44", "other/db/sql", 0),
            one("ad01", "default/disk/io", 0),
            one("beef", "default/meat/cow", 0),
            one("dd55", "default/clock/ad", 0),
            one("ee66", "default/web/beef", 0),
        ];
        for (wanted, id) in [
            ("app", "aa11"),
            ("web/app", "aa11"),
            ("default/web/app", "aa11"),
            ("aa2", "aa22"),
            ("aa11", "aa11"),
            ("default/db/sql", "bb33"),
            ("cc4", "cc44"),
            ("ad", "dd55"),
            ("web/beef", "ee66"),
        ] {
            assert_eq!(container(wanted, &all).map(|one| one.id.as_str()), Ok(id), "{wanted}");
        }
        for (wanted, expected) in [
            ("sql", "several containers are called sql: bb33 (default/db/sql, running), cc44 ("),
            ("db/sql", "several"),
            ("nobody", "no container"),
            ("", "no container"),
            ("/web/app", "no container"),
            ("ff0", "no container"),
            ("aa", "no container"),
            ("beef", "several containers are called beef: beef (default/meat/cow, running), ee66 ("),
        ] {
            let error = container(wanted, &all).unwrap_err();
            assert!(error.starts_with(expected), "{wanted}: {error}");
        }
        // Of one pod an ID that is ambiguous is no guess either, unless it is the same container.
        let all = [one("aaa1", "default/web/app", 1), one("aaa2", "default/web/app", 0)];
        assert_eq!(container("aaa", &all).map(|one| one.id.as_str()), Ok("aaa1"));
    }
}
