//! Tests the rules of NRI 4 without plugins, from answers to the merged adjustment and the effective container.

use super::*;

fn container() -> api::Container {
    api::Container {
        id: "c1".into(),
        name: "main".into(),
        annotations: [("old".to_owned(), "1".to_owned())].into(),
        args: vec!["/app".into()],
        env: vec!["PATH=/bin".into(), "OLD=1".into()],
        mounts: vec![mount("/proc"), mount("/data")],
        rlimits: vec![limit("RLIMIT_NOFILE", 1024)],
        linux: Some(api::LinuxContainer { devices: vec![device("/dev/old")], ..Default::default() }),
        ..Default::default()
    }
}

fn mount(destination: &str) -> api::Mount {
    api::Mount {
        destination: destination.into(),
        source: "/src".into(),
        r#type: "bind".into(),
        options: Vec::new(),
    }
}

fn limit(kind: &str, soft: u64) -> api::PosixRlimit {
    api::PosixRlimit { r#type: kind.into(), soft, hard: 4096 }
}

fn device(path: &str) -> api::LinuxDevice {
    api::LinuxDevice { path: path.into(), r#type: "c".into(), major: 1, minor: 3, ..Default::default() }
}

fn variable(key: &str, value: &str) -> api::KeyValue {
    api::KeyValue { key: key.into(), value: value.into() }
}

fn annotate(pairs: &[(&str, &str)]) -> api::ContainerAdjustment {
    let annotations = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    api::ContainerAdjustment { annotations, ..Default::default() }
}

fn in_linux(linux: api::LinuxContainerAdjustment) -> api::ContainerAdjustment {
    api::ContainerAdjustment { linux: Some(linux), ..Default::default() }
}

fn limited(resources: api::LinuxResources) -> api::ContainerAdjustment {
    in_linux(api::LinuxContainerAdjustment { resources: Some(resources), ..Default::default() })
}

fn memory(limit: Option<i64>, swap: Option<i64>) -> api::LinuxResources {
    let number = |value| api::OptionalInt64 { value };
    let memory = api::LinuxMemory { limit: limit.map(number), swap: swap.map(number), ..Default::default() };
    api::LinuxResources { memory: Some(memory), ..Default::default() }
}

/// Merges the answers of plugins `00-a`, `10-b`, …; returns the merge or the text of the error.
fn merged(answers: Vec<api::ContainerAdjustment>) -> Result<Merge, String> {
    let mut merge = Merge::new(container());
    for (name, answer) in ["00-a", "10-b", "20-c"].into_iter().zip(answers) {
        merge.adjust(name, answer)?;
    }
    Ok(merge)
}

/// Rules of docs/specs/nri.md: NRI-C16.
#[test]
fn annotations_are_set_removed_and_taken_over() {
    let merge =
        merged(vec![annotate(&[("k", "a"), ("-old", "")]), annotate(&[("-k", ""), ("k", "b")])]).unwrap();
    assert_eq!(merge.view().annotations, [("k".to_owned(), "b".to_owned())].into());
    let merge = merged(vec![annotate(&[("k", "a")]), annotate(&[("-k", "")])]).unwrap();
    assert_eq!(merge.view().annotations, [("old".to_owned(), "1".to_owned())].into());
    // The earlier value does not remain next to its removal.
    let keys: Vec<_> = merge.finish().0.annotations.into_keys().collect();
    assert_eq!(keys, ["-k"]);
}

/// Rules of docs/specs/nri.md: NRI-C16.
#[test]
fn variables_mounts_and_devices_are_set_removed_and_taken_over() {
    let first = api::ContainerAdjustment {
        env: vec![variable("NEW", "1"), variable("-OLD", ""), variable("PATH", "/x")],
        mounts: vec![mount("/data/sub"), mount("-/proc")],
        linux: Some(api::LinuxContainerAdjustment {
            devices: vec![device("/dev/new")],
            ..Default::default()
        }),
        ..Default::default()
    };
    let second = api::ContainerAdjustment {
        env: vec![variable("-NEW", ""), variable("NEW", "2")],
        mounts: vec![mount("-/data/sub")],
        linux: Some(api::LinuxContainerAdjustment {
            devices: vec![device("-/dev/old")],
            ..Default::default()
        }),
        ..Default::default()
    };
    let merge = merged(vec![first, second]).unwrap();
    assert_eq!(merge.view().env, ["PATH=/x", "NEW=2"]);
    let mounts: Vec<_> = merge.view().mounts.iter().map(|mount| mount.destination.as_str()).collect();
    assert_eq!(mounts, ["/data"]);
    let devices = &merge.view().linux.as_ref().unwrap().devices;
    assert_eq!(devices.iter().map(|device| device.path.as_str()).collect::<Vec<_>>(), ["/dev/new"]);
}

/// Rules of docs/specs/nri.md: NRI-C16.
#[test]
fn mounts_are_sorted_parents_first() {
    let asked = api::ContainerAdjustment { mounts: vec![mount("/z/a/b"), mount("/a")], ..Default::default() };
    let merge = merged(vec![asked]).unwrap();
    let mounts: Vec<_> = merge.view().mounts.iter().map(|mount| mount.destination.as_str()).collect();
    assert_eq!(mounts, ["/a", "/data", "/proc", "/z/a/b"]);
}

/// Rules of docs/specs/nri.md: NRI-C16.
#[test]
fn arguments_rlimits_and_fields_cleared_by_their_value_are_merged() {
    let with_args = |args: &[&str]| api::ContainerAdjustment {
        args: args.iter().map(|text| (*text).to_owned()).collect(),
        ..Default::default()
    };
    let merge = merged(vec![with_args(&["/x", "1"]), with_args(&[""]), with_args(&["", "/y"])]).unwrap();
    assert_eq!(merge.view().args, ["/y"]);
    let rlimits = api::ContainerAdjustment { rlimits: vec![limit("RLIMIT_NOFILE", 7)], ..Default::default() };
    assert_eq!(merged(vec![rlimits]).unwrap().view().rlimits, [limit("RLIMIT_NOFILE", 7)]);
    let priority = |class: api::IoPrioClass| {
        let priority = api::LinuxIoPriority { class: class.into(), priority: 4 };
        in_linux(api::LinuxContainerAdjustment { io_priority: Some(priority), ..Default::default() })
    };
    let (best, none) = (api::IoPrioClass::IoprioClassBe, api::IoPrioClass::IoprioClassNone);
    let merge = merged(vec![priority(best), priority(none)]).unwrap();
    assert_eq!(merge.view().linux.as_ref().unwrap().io_priority, None);
}

/// Rules of docs/specs/nri.md: NRI-C16.
#[test]
fn a_removal_of_rdt_clears_earlier_values() {
    let rdt = |remove, clos: Option<&str>| {
        let clos_id = clos.map(|value| api::OptionalString { value: value.into() });
        let rdt = api::LinuxRdt { remove, clos_id, ..Default::default() };
        in_linux(api::LinuxContainerAdjustment { rdt: Some(rdt), ..Default::default() })
    };
    let merge = merged(vec![rdt(false, Some("gold")), rdt(true, Some("lead"))]).unwrap();
    let shown = merge.view().linux.as_ref().unwrap().rdt.clone().unwrap();
    assert_eq!((shown.clos_id.unwrap().value, shown.remove), ("lead".to_owned(), false));
    assert_eq!(
        merged(vec![rdt(false, Some("x")), rdt(true, None)]).unwrap().view().linux.as_ref().unwrap().rdt,
        None
    );
}

/// Rules of docs/specs/nri.md: NRI-C17.
#[test]
fn conflict_texts_are_those_of_other_runtimes() {
    let text = |answers| merged(answers).map(|_| ()).unwrap_err();
    let twice = |one: api::ContainerAdjustment| vec![one.clone(), one];
    assert_eq!(
        text(twice(annotate(&[("k", "v")]))),
        "plugins \"10-b\" and \"00-a\" both tried to set Annotations k"
    );
    // The entry of a simple field is empty, so the text ends with a space.
    assert_eq!(
        text(twice(limited(memory(Some(1 << 30), None)))),
        "plugins \"10-b\" and \"00-a\" both tried to set MemLimit "
    );
    let variables = api::ContainerAdjustment { env: vec![variable("A", "1")], ..Default::default() };
    assert!(text(twice(variables)).ends_with("both tried to set Env A"));
    let namespaces = api::LinuxNamespace { r#type: "-ipc".into(), path: String::new() };
    let namespaces = api::LinuxContainerAdjustment { namespaces: vec![namespaces], ..Default::default() };
    assert!(text(twice(in_linux(namespaces))).ends_with("both tried to set Namespace ipc"));
    let cdi = api::CdiDevice { name: "v.com/c=d".into() };
    let itself = api::ContainerAdjustment { cdi_devices: vec![cdi.clone(), cdi], ..Default::default() };
    assert_eq!(text(vec![itself]), "plugins \"00-a\" and \"00-a\" both tried to set CdiDevices v.com/c=d");
}

/// Rules of docs/specs/nri.md: NRI-C18.
#[test]
fn only_the_plugin_that_cleared_an_entry_may_set_it() {
    let takes_over = annotate(&[("-k", ""), ("k", "b")]);
    let merge = merged(vec![annotate(&[("k", "a")]), takes_over]).unwrap();
    assert_eq!(merge.view().annotations["k"], "b");
    let error = merged(vec![annotate(&[("-k", "")]), annotate(&[("k", "b")])]).map(|_| ()).unwrap_err();
    assert_eq!(error, "plugins \"10-b\" and \"00-a\" both tried to set Annotations k");
}

/// Rules of docs/specs/nri.md: NRI-C19.
#[test]
fn hooks_of_all_plugins_are_appended_in_order() {
    let hook = |path: &str| api::ContainerAdjustment {
        hooks: Some(api::Hooks {
            poststart: vec![api::Hook { path: path.into(), ..Default::default() }],
            ..Default::default()
        }),
        ..Default::default()
    };
    let merge = merged(vec![hook("/a"), hook("/b")]).unwrap();
    let shown = merge.view().hooks.as_ref().unwrap();
    assert_eq!(shown.poststart.iter().map(|hook| hook.path.as_str()).collect::<Vec<_>>(), ["/a", "/b"]);
    assert_eq!(merge.owners.told().simple[&(Field::OciHooks as i32)], "00-a,10-b");
}

/// Rules of docs/specs/nri.md: NRI-C20.
#[test]
fn swap_follows_the_memory_limit_unless_set() {
    let shown = |answers| {
        let merge = merged(answers).unwrap();
        let memory = merge.view().linux.as_ref().unwrap().resources.as_ref().unwrap().memory.unwrap();
        (memory.limit.map(|limit| limit.value), memory.swap.map(|swap| swap.value))
    };
    assert_eq!(shown(vec![limited(memory(Some(7), None))]), (Some(7), Some(7)));
    assert_eq!(shown(vec![limited(memory(Some(7), Some(9)))]), (Some(7), Some(9)));
    // The first plugin's swap limit is kept, although the second sets only a memory limit.
    let answers = vec![limited(memory(None, Some(9))), limited(memory(Some(8), None))];
    assert_eq!(shown(answers), (Some(8), Some(9)));
}

/// Rules of docs/specs/nri.md: NRI-C21.
#[test]
fn an_adjustment_always_has_the_same_encoding() {
    use prost::Message as _;
    let answer = || {
        let mut answer = annotate(&[("b", "1"), ("a", "2"), ("-old", ""), ("c", "3")]);
        answer.env = vec![variable("X", "1"), variable("-OLD", "")];
        vec![answer, annotate(&[("-a", ""), ("a", "9")])]
    };
    let first = merged(answer()).unwrap().view().encode_to_vec();
    for _ in 0..100 {
        assert_eq!(merged(answer()).unwrap().view().encode_to_vec(), first);
    }
}

/// Rules of docs/specs/nri.md: NRI-C23.
#[test]
fn the_container_under_creation_cannot_be_updated() {
    let mut merge = Merge::new(container());
    let update = api::ContainerUpdate { container_id: "c1".into(), ..Default::default() };
    let error = merge.update("10-b", vec![update]).unwrap_err();
    assert_eq!(error, "plugin \"10-b\" asked update of \"c1\" during creation");
}

fn update(id: &str, resources: api::LinuxResources, ignore_failure: bool) -> api::ContainerUpdate {
    let linux = Some(api::LinuxContainerUpdate { resources: Some(resources) });
    api::ContainerUpdate { container_id: id.into(), linux, ignore_failure }
}

/// Rules of docs/specs/nri.md: NRI-C15.
#[test]
fn the_second_plugin_gets_the_changes_of_the_first() {
    let mut merge = Merge::of_update("c1".into(), memory(Some(1), None));
    merge.update("00-a", vec![update("c1", memory(Some(2), None), false)]).unwrap();
    assert_eq!(merge.resources().memory.unwrap().limit.unwrap().value, 2);
    let error = merge.update("10-b", vec![update("c1", memory(Some(3), None), false)]).unwrap_err();
    assert_eq!(error, "plugins \"10-b\" and \"00-a\" both tried to set MemLimit ");
    assert_eq!(merge.finish_update().0, Some(memory(Some(2), None)));
    assert_eq!(Merge::of_update("c1".into(), memory(Some(1), None)).finish_update().0, None);
}

/// Rules of docs/specs/nri.md: NRI-C27.
#[test]
fn updates_of_other_containers_are_merged_entirely_or_not_at_all() {
    let pids = api::LinuxResources { pids: Some(api::LinuxPids { limit: 9 }), ..Default::default() };
    let both = api::LinuxResources { pids: Some(api::LinuxPids { limit: 8 }), ..memory(Some(5), None) };
    let mut merge = Merge::new(container());
    merge.update("00-a", vec![update("c2", pids.clone(), true)]).unwrap();
    // It conflicts in one field, so the whole update is dropped, and another plugin may set the memory.
    merge.update("10-b", vec![update("c2", both, true)]).unwrap();
    merge.update("20-c", vec![update("c2", memory(Some(6), None), false), update("c0", pids, true)]).unwrap();
    let updates = merge.finish().1;
    assert_eq!(updates.iter().map(|update| update.container_id.as_str()).collect::<Vec<_>>(), ["c2", "c0"]);
    let merged = updates[0].linux.as_ref().unwrap().resources.as_ref().unwrap();
    assert_eq!((merged.pids.unwrap().limit, merged.memory.unwrap().limit.unwrap().value), (9, 6));
    assert!(!updates[0].ignore_failure, "one part must not fail");
    assert!(updates[1].ignore_failure);
}

/// Rules of docs/specs/nri.md: NRI-C28.
#[test]
fn validators_get_the_owners_of_fields() {
    let mut merge = merged(vec![annotate(&[("k", "v")]), annotate(&[("-old", "")])]).unwrap();
    merge.update("20-c", vec![update("c2", memory(Some(6), None), false)]).unwrap();
    let request = merge.validation(&api::PodSandbox::default(), &container(), &[]);
    assert_eq!(request.container, Some(container()), "it is the untouched one");
    let owners = request.owners.unwrap().owners;
    let annotations = &owners["c1"].compound[&(Field::Annotations as i32)].owners;
    assert_eq!((annotations["k"].as_str(), annotations["old"].as_str()), ("00-a", "-10-b"));
    assert_eq!(owners["c2"].simple[&(Field::MemLimit as i32)], "20-c");
}

#[test]
fn bad_values_are_refused_by_name() {
    let in_env = |key: &str| api::ContainerAdjustment { env: vec![variable(key, "")], ..Default::default() };
    let device_of = |kind: &str| {
        let device = api::LinuxDevice { r#type: kind.into(), ..device("/dev/x") };
        in_linux(api::LinuxContainerAdjustment { devices: vec![device], ..Default::default() })
    };
    let cpus = api::LinuxResources {
        cpu: Some(api::LinuxCpu { cpus: "0-".into(), ..Default::default() }),
        ..Default::default()
    };
    let score = api::LinuxContainerAdjustment {
        oom_score_adj: Some(api::OptionalInt { value: 1001 }),
        ..Default::default()
    };
    let cases = [
        (in_env("A=B"), "\"A=B\""),
        (api::ContainerAdjustment { mounts: vec![mount("data")], ..Default::default() }, "\"data\""),
        (api::ContainerAdjustment { rlimits: vec![limit("RLIMIT_X", 1)], ..Default::default() }, "RLIMIT_X"),
        (
            api::ContainerAdjustment { rlimits: vec![limit("RLIMIT_CPU", 9999)], ..Default::default() },
            "above hard",
        ),
        (device_of("x"), "type \"x\""),
        (limited(cpus), "0-"),
        (in_linux(score), "1001"),
    ];
    for (answer, expected) in cases {
        let error = merged(vec![answer]).map(|_| ()).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
}

/// For any answers of two plugins, the effective container equals that of a simple model, and the owner of an entry is
/// the plugin that set it last.
#[test]
fn merged_adjustments_equal_those_of_a_simple_model() {
    let mut state = 88_172_645_463_325_252u64;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    for round in 0..2000 {
        let answers: Vec<Vec<(String, String)>> = (0..3)
            .map(|_| {
                let pairs = (0..random(4)).map(|_| {
                    let mark = if random(2) == 0 { "-" } else { "" };
                    (format!("{mark}k{}", random(3)), format!("v{}", random(9)))
                });
                pairs.collect()
            })
            .collect();
        let mut model = container().annotations;
        let mut owner: BTreeMap<String, (usize, bool)> = BTreeMap::new();
        let mut conflicts = false;
        for (plugin, answer) in answers.iter().enumerate() {
            let answer: BTreeMap<_, _> = answer.iter().cloned().collect();
            for key in answer.keys().filter_map(|key| key.strip_prefix('-')) {
                model.remove(key);
                owner.insert(key.to_owned(), (plugin, false));
            }
            for (key, value) in answer.iter().filter(|(key, _)| !key.starts_with('-')) {
                let held = owner.get(key).is_some_and(|(by, is_set)| *is_set || *by != plugin);
                conflicts |= held;
                model.insert(key.clone(), value.clone());
                owner.insert(key.clone(), (plugin, true));
            }
            if conflicts {
                break;
            }
        }
        let asked = answers.iter().map(|answer| {
            let pairs: Vec<_> = answer.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            annotate(&pairs)
        });
        match merged(asked.collect()) {
            Ok(merge) => {
                assert!(!conflicts, "round {round}: {answers:?}");
                assert_eq!(merge.view().annotations, model, "round {round}: {answers:?}");
            }
            Err(error) => assert!(conflicts, "round {round}: {error}: {answers:?}"),
        }
    }
}
