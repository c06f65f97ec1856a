//! Seccomp on the real kernel: containers and execs run with the requested filter and no other.

use std::fs;

use coracle_tests::cri::proto::{
    ContainerConfig, ContainerState, SecurityProfile, security_profile::ProfileType,
};
use coracle_tests::pod_fixture::PodFixture;
use coracle_tests::request;
use tonic::Code;

fn ask(config: &mut ContainerConfig, kind: ProfileType, path: &str) {
    let profile = SecurityProfile { profile_type: kind.into(), localhost_ref: path.into() };
    request::security(config).seccomp = Some(profile);
}

/// Output and errors of an exec in a container.
fn exec(fixture: &PodFixture, container: &str, words: &[&str]) -> String {
    let answer = fixture.node.exec_sync(request::exec(container, words, 10)).expect("an exec");
    String::from_utf8_lossy(&[answer.stdout, answer.stderr].concat()).into_owned()
}

#[test]
fn the_default_seccomp_filter_applies_only_if_it_is_requested() {
    let fixture = PodFixture::start();
    for (kind, expected) in
        [(ProfileType::RuntimeDefault, "ids Seccomp 2"), (ProfileType::Unconfined, "ids Seccomp 0")]
    {
        let seen = fixture.output(&["see", "ids"], |config| ask(config, kind, ""));
        assert!(seen.contains(expected), "{kind:?}: {seen}");
        // With no_new_privs the filter is set at another step of the launch.
        let seen = fixture.output(&["see", "ids"], |config| {
            ask(config, kind, "");
            request::security(config).no_new_privs = true;
            request::security(config).run_as_user =
                Some(coracle_tests::cri::proto::Int64Value { value: 1000 });
        });
        assert!(seen.contains(expected) && seen.contains("NoNewPrivs 1"), "{kind:?}: {seen}");
    }
    assert!(fixture.output(&["see", "ids"], |_| ()).contains("ids Seccomp 0"), "nil is unconfined");
    let mut config = fixture.config("default", &["sleep", "forever"]);
    ask(&mut config, ProfileType::RuntimeDefault, "");
    let container = fixture.run(&config);
    assert!(exec(&fixture, &container, &["see", "ids"]).contains("ids Seccomp 2"));
    fixture.node.stop();
}

#[test]
fn a_localhost_profile_decides_by_call_and_argument_in_execs_too() {
    let fixture = PodFixture::start();
    let path = fixture.node.folder().join("profile.json");
    let text = r#"{
        "defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": [
            {"names": ["getcwd", "getcvd"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95},
            {"names": ["tkill"], "action": "SCMP_ACT_ERRNO", "errnoRet": 28,
             "args": [{"index": 1, "value": 10, "op": "SCMP_CMP_EQ"}]}
        ]}"#;
    fs::write(&path, text).expect("a profile");
    let mut config = fixture.config("local", &["sleep", "forever"]);
    ask(&mut config, ProfileType::Localhost, &path.display().to_string());
    let container = fixture.run(&config);
    // An unknown name is logged. Regression: the rule was ignored silently.
    let log = fixture.node.log();
    let line = log.lines().find(|line| line.contains("unknown system calls")).unwrap_or_default();
    assert!(line.contains("level=warn") && line.contains("calls=getcvd"), "{line}");
    assert!(line.contains(&path.display().to_string()), "{line}");
    fs::remove_file(&path).expect("the profile is ours");
    let said = exec(&fixture, &container, &["see", "place"]);
    assert!(said.contains("os error 95"), "the filter is the container's, not the file's: {said}");
    let said = exec(&fixture, &container, &["raise", "SIGUSR1"]);
    assert!(said.contains("ENOSPC") || said.contains("No space"), "{said}");
    assert_eq!(exec(&fixture, &container, &["raise", "SIGCHLD"]), "", "another signal is another argument");
    // After a restart, too.
    let mut fixture = fixture;
    fixture.node.restart();
    assert!(exec(&fixture, &container, &["see", "place"]).contains("os error 95"));
    fixture.node.stop();
}

/// An exec never runs with less confinement than its container: without the stored confinement it is refused, and the
/// container runs on.
#[test]
fn an_exec_whose_confinement_cannot_be_read_is_refused() {
    let mut fixture = PodFixture::start();
    let mut config = fixture.config("lost", &["sleep", "forever"]);
    ask(&mut config, ProfileType::RuntimeDefault, "");
    let container = fixture.run(&config);
    let file = fixture.node.state().join("pods").join(&fixture.pod_id).join("confinement").join(&container);
    let stored = fs::read(&file).expect("the confinement");
    let mut flipped = stored.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    let damages: [(&str, &[u8]); 4] = [
        ("flipped", &flipped),
        ("cut", &stored[..stored.len() - 1]),
        ("empty", b""),
        ("longer", &[&stored[..], b"\0"].concat()),
    ];
    for (what, bytes) in damages {
        fs::write(&file, bytes).expect("the state directory is ours");
        let refused = fixture.node.exec_sync(request::exec(&container, &["true"], 10)).expect_err(what);
        assert_eq!(refused.code(), Code::Internal, "{what}: {refused}");
        assert!(refused.message().contains(&file.display().to_string()), "{what}: {refused}");
    }
    fs::remove_file(&file).expect("the state directory is ours");
    fixture.node.restart();
    let refused =
        fixture.node.exec_sync(request::exec(&container, &["true"], 10)).expect_err("there is none");
    assert!(refused.message().contains("no such record"), "{refused}");
    assert_eq!(fixture.node.container(&container).state(), ContainerState::ContainerRunning);
    fs::write(&file, &stored).expect("the state directory is ours");
    assert!(exec(&fixture, &container, &["see", "ids"]).contains("ids Seccomp 2"));
    fixture.node.stop();
}

#[test]
fn profiles_that_cannot_be_used_are_refused_at_create() {
    let fixture = PodFixture::start();
    let broken = fixture.node.folder().join("broken.json");
    fs::write(&broken, r#"{"defaultAction": "SCMP_ACT_DANCE"}"#).expect("a profile");
    for (path, expected) in [
        ("/no/such/profile.json".to_owned(), "/no/such/profile.json"),
        ("relative.json".to_owned(), "not an absolute path"),
        (broken.display().to_string(), "SCMP_ACT_DANCE"),
    ] {
        let mut config = fixture.config("refused", &["true"]);
        ask(&mut config, ProfileType::Localhost, &path);
        let request = request::create(&fixture.pod_id, &config, &fixture.pod);
        let error = fixture.node.create_container(request).unwrap_err();
        assert_eq!(error.code() as i32, 3, "{path}: {error}");
        assert!(error.message().contains(expected) && error.message().contains("seccomp"), "{path}: {error}");
    }
    fixture.node.stop();
}
