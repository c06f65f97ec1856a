//! Tests the network as the engine uses it: with real directories and inotify watches; closures act as
//! workers.

use std::cell::{Cell, RefCell};
use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use coracle_base::error::{Error, Kind};
use coracle_base::reactor;
use coracle_job::{CniCommand, CniJob, CniOutcome, Job, Outcome, PortMapping};

use super::{DefaultNetwork, Network, Options, PodNetwork, Recorded, RunJob};

/// A configuration directory of one test; removed on drop.
pub(super) struct Folder(pub(super) PathBuf);

impl Folder {
    pub(super) fn new(test: &str) -> Folder {
        let dir = std::env::temp_dir().join(format!("coracle-network-{test}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Folder(dir)
    }

    pub(super) fn write(&self, name: &str, text: &str) {
        fs::write(self.0.join(name), text).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const LIST: &str =
    r#"{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"bridge","capabilities":{"dns":true}}]}"#;
const LIST_WITH_STATUS: &str = r#"{"cniVersion":"1.1.0","name":"pods","plugins":[{"type":"bridge"}]}"#;

/// Workers that answer with `answer`, and the jobs that they have received.
fn workers(
    answer: impl Fn(&CniJob) -> Result<CniOutcome, Error> + 'static,
) -> (RunJob, Rc<RefCell<Vec<CniJob>>>) {
    let asked = Rc::new(RefCell::new(Vec::new()));
    let log = Rc::clone(&asked);
    let run: RunJob = Box::new(move |job| {
        let Job::Cni(job) = job else { panic!("{job:?}") };
        let answer = answer(&job).map(Outcome::Cni);
        log.borrow_mut().push(job);
        Box::pin(async move { answer })
    });
    (run, asked)
}

fn idle() -> RunJob {
    workers(|_| Ok(CniOutcome::default())).0
}

/// Options without built-in plugins.
fn in_dir(dir: &Path) -> Options {
    Options { conf_dir: dir.to_owned(), ..Options::default() }
}

/// A pod without special parameters.
pub(crate) fn pod() -> PodNetwork<'static> {
    PodNetwork {
        id: "c0ffee",
        name: "web",
        namespace: "default",
        uid: "1-2",
        netns: "/run/netns/a",
        port_mappings: &[],
        dns: None,
        cgroup_parent: "",
        annotations: &[],
        pod_cidr: "",
    }
}

/// Waits until `done` returns true, for at most 10 s.
async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < end, "{what}: not within 10 s");
        reactor::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn readiness_follows_the_directory_and_names_it() {
    let folder = Folder::new("ready");
    let dir = folder.0.join("net.d");
    let network = Network::new(in_dir(&dir), idle());
    let none = format!("cni plugin not initialized: no CNI configuration file in {}", dir.display());
    assert_eq!(network.ready(), Err(none.clone()));
    let refused = network.plan(&pod()).unwrap_err();
    assert_eq!((refused.kind(), refused.message()), (Kind::FailedPrecondition, none.as_str()));

    fs::create_dir(&dir).unwrap();
    folder.write("net.d/10-pods.conflist", "{");
    let broken = network.ready().unwrap_err();
    let file = dir.join("10-pods.conflist");
    assert!(broken.starts_with(&format!("cni plugin not initialized: {}: EOF", file.display())), "{broken}");

    folder.write("net.d/10-pods.conflist", LIST);
    assert_eq!(network.ready(), Ok(()));
    assert_eq!(network.conflist().as_deref(), Some(LIST));

    folder.write("net.d/10-pods.conflist", "half a fi");
    assert_eq!(network.ready(), Ok(()), "a partly written file has no effect");
    assert!(network.load_status().is_err());

    fs::remove_file(file).unwrap();
    assert_eq!(network.ready(), Err(none));
}

#[test]
fn the_watch_detects_added_and_removed_files() {
    let folder = Folder::new("watch");
    let dir = folder.0.join("cni/net.d");
    reactor::run(async {
        let network = Network::new(in_dir(&dir), idle());
        network.start();
        let is_loaded = || network.state.borrow().list.is_some();
        reactor::sleep(Duration::from_millis(50)).await;
        fs::create_dir_all(&dir).unwrap();
        folder.write("cni/net.d/tmp", LIST);
        fs::rename(dir.join("tmp"), dir.join("1.conflist")).unwrap();
        until("directory and file were created", is_loaded).await;
        fs::remove_file(dir.join("1.conflist")).unwrap();
        until("the file was removed", || !is_loaded()).await;
        fs::create_dir(dir.join("pods")).unwrap();
        folder.write("cni/net.d/1.conflist", r#"{"cniVersion":"1.0.0","name":"pods"}"#);
        reactor::sleep(Duration::from_millis(250)).await;
        assert!(!is_loaded(), "a list without plugins");
        folder.write("cni/net.d/pods/1.conf", r#"{"type":"bridge"}"#);
        until("a plugin was added to the network's directory", is_loaded).await;
        fs::remove_dir_all(folder.0.join("cni")).unwrap();
        until("all files were removed", || !is_loaded()).await;
        fs::create_dir_all(&dir).unwrap();
        folder.write("cni/net.d/1.conflist", LIST);
        until("all files were created again", is_loaded).await;
    });
}

#[test]
fn add_waits_for_recovery_and_del_does_not() {
    let folder = Folder::new("gate");
    folder.write("1.conflist", LIST);
    let added = CniOutcome { addresses: vec!["10.1.0.5".into()], ..CniOutcome::default() };
    let answer = added.clone();
    let (run, asked) = workers(move |_| Ok(answer.clone()));
    reactor::run(async {
        let network =
            Network::new(Options { bin_dirs: vec!["/opt/cni/bin".into()], ..in_dir(&folder.0) }, run);
        let recorded = network.plan(&pod()).unwrap();
        let adding = {
            let (network, recorded) = (Rc::clone(&network), recorded.clone());
            reactor::spawn(async move { network.add(&recorded).await })
        };
        let old = recorded.clone().without_namespace();
        network.del(&old, Some("{}")).await.unwrap();
        network.recovered();
        assert_eq!(adding.await.unwrap(), added);
        assert_eq!(network.add(&recorded).await.unwrap(), added, "recovery is complete");
    });
    let asked = asked.borrow();
    let commands: Vec<_> = asked.iter().map(|job| job.command.clone()).collect();
    let del = CniCommand::Del { previous_result: Some("{}".into()) };
    assert_eq!(
        commands,
        [del, CniCommand::Add { previous_result: None }, CniCommand::Add { previous_result: None }]
    );
    assert_eq!(asked[0].attachment.netns, "");
    assert_eq!(asked[1].attachment.netns, "/run/netns/a");
    assert_eq!(asked[1].conflist, LIST);
    assert_eq!(asked[1].bin_dirs, [PathBuf::from("/opt/cni/bin")]);
}

#[test]
fn del_uses_the_configuration_that_was_recorded_before_add() {
    let folder = Folder::new("keep");
    folder.write("1.conflist", LIST);
    let (run, asked) =
        workers(|_| Err(Error::new(Kind::Internal, "plugin type=\"bridge\" failed (del): busy")));
    reactor::run(async {
        let network = Network::new(in_dir(&folder.0), run);
        let recorded = network.plan(&pod()).unwrap();
        folder.write("1.conflist", &LIST.replace("bridge", "ptp"));
        assert!(network.plan(&pod()).unwrap().conflist.contains("ptp"));
        let error = network.del(&recorded, None).await.unwrap_err();
        assert_eq!(error.message(), "plugin type=\"bridge\" failed (del): busy");
    });
    assert_eq!(asked.borrow()[0].conflist, LIST);
}

#[test]
fn status_of_plugins_is_polled_in_the_background() {
    let folder = Folder::new("status");
    folder.write("1.conflist", LIST_WITH_STATUS);
    let healthy = Rc::new(Cell::new(false));
    let answers = Rc::clone(&healthy);
    let (run, asked) = workers(move |_| match answers.get() {
        true => Ok(CniOutcome::default()),
        false => Err(Error::new(Kind::Internal, "plugin type=\"bridge\" failed (status): no route")),
    });
    reactor::run(async {
        let network = Network::new(in_dir(&folder.0), run);
        let unknown = "cni plugin not ready: waiting for the first STATUS of its plugins";
        assert_eq!(network.ready(), Err(unknown.to_owned()));
        network.start();
        until("a result of STATUS", || network.ready() != Err(unknown.to_owned())).await;
        let why = "cni plugin not ready: plugin type=\"bridge\" failed (status): no route";
        assert_eq!(network.ready(), Err(why.to_owned()));
        // STATUS of a new list runs at once.
        healthy.set(true);
        folder.write("1.conflist", &LIST_WITH_STATUS.replace("bridge", "ptp"));
        until("the other list is ready", || network.ready().is_ok()).await;
        // A list of an older version has no STATUS and is ready at once.
        healthy.set(false);
        folder.write("1.conflist", LIST);
        assert_eq!(network.ready(), Ok(()));
    });
    assert!(
        asked.borrow().iter().all(|job| job.command == CniCommand::Status && job.attachment.netns.is_empty())
    );
}

#[test]
fn records_can_be_parsed_with_added_and_missing_fields() {
    let folder = Folder::new("record");
    folder.write("1.conflist", LIST);
    let network = Network::new(in_dir(&folder.0), idle());
    let ports =
        [PortMapping { host_port: 80, container_port: 80, protocol: "tcp".into(), host_ip: String::new() }];
    let recorded = network.plan(&PodNetwork { port_mappings: &ports, ..pod() }).unwrap();
    let text = serde_json::to_string(&recorded).unwrap();
    assert_eq!(serde_json::from_str::<Recorded>(&text).unwrap(), recorded);
    // The format of the first release; later releases may add fields, older ones may lack some.
    let golden = r#"{"conflist":"{}","attachment":{"container_id":"c0ffee","netns":"/run/netns/a","interface":"eth0","arguments":[["IgnoreUnknown","1"]],"port_mappings":[{"host_port":80,"container_port":80,"protocol":"tcp","host_ip":""}],"capabilities":[["dns","{}"]]}}"#;
    let read: Recorded = serde_json::from_str(golden).unwrap();
    assert_eq!(serde_json::to_string(&read).unwrap(), golden);
    for other in [
        golden.replace(r#","capabilities":[["dns","{}"]]"#, ""),
        golden.replace("\"netns\"", "\"new\":1,\"netns\""),
    ] {
        let read: Recorded = serde_json::from_str(&other).unwrap_or_else(|error| panic!("{other}: {error}"));
        assert_eq!(read.attachment.container_id, "c0ffee", "{other}");
    }
}

#[test]
fn the_default_network_applies_until_another_is_configured() {
    let folder = Folder::new("default");
    let default = DefaultNetwork {
        bridge: "coracle0".into(),
        subnets: vec!["10.86.0.0/16".into(), "fd86::/64".into()],
        checks_neighbours: true,
        data_dir: "/d".into(),
    };
    let options = Options { runs_built_in: true, default: Some(default), ..in_dir(&folder.0) };
    let network = Network::new(options, idle());
    assert_eq!((network.ready(), network.load_status()), (Ok(()), Ok(())));
    let recorded = network.plan(&pod()).unwrap();
    assert!(recorded.is_built_in, "{recorded:?}");
    for part in
        ["10.86.0.0/16", "fd86::/64", "0.0.0.0/0", "::/0", "\"bridge\":\"coracle0\"", "\"dataDir\":\"/d\""]
    {
        assert!(recorded.conflist.contains(part), "{part} in {}", recorded.conflist);
    }
    let told = network.plan(&PodNetwork { pod_cidr: "10.42.3.0/24", ..pod() }).unwrap();
    assert!(told.is_built_in && told.conflist.contains("10.42.3.0/24"), "{told:?}");
    assert!(!told.conflist.contains("10.86.") && !told.conflist.contains("fd86"), "{told:?}");

    folder.write("1.conflist", "{");
    let broken = network.ready().unwrap_err();
    assert!(
        broken.contains("1.conflist: EOF"),
        "an invalid configuration is not replaced by the default network: {broken}"
    );
    folder.write("1.conflist", LIST);
    let by_programs = network.plan(&pod()).unwrap();
    assert_eq!(by_programs, Recorded { conflist: LIST.into(), is_built_in: false, ..recorded.clone() });
    fs::remove_file(folder.0.join("1.conflist")).unwrap();
    assert_eq!(network.plan(&pod()).unwrap().conflist, recorded.conflist);
}

#[test]
fn an_invalid_default_network_is_refused() {
    let with = |bridge: &str, subnet: &str| {
        let subnets = vec![subnet.to_owned()];
        DefaultNetwork { bridge: bridge.into(), subnets, checks_neighbours: true, data_dir: "/d".into() }
            .check()
    };
    assert_eq!(with("coracle0", "10.86.0.0/16"), Ok(()));
    for (bridge, subnet, part) in [
        ("a-name-that-is-too-long", "10.86.0.0/16", "name"),
        ("coracle0", "10.86.0.1/16", "10.86.0.1/16 has host bits set"),
        ("coracle0", "10.86.0.0", "10.86.0.0"),
        ("coracle0", "10.86.0.0/31", "too small"),
    ] {
        let why = with(bridge, subnet).unwrap_err();
        assert!(why.contains(part), "{bridge} {subnet}: {why}");
    }
}

/// The list of flannel: its own plugin is a program, the others are built in. Only the program is searched
/// for and called with STATUS.
#[test]
fn built_in_plugins_of_a_list_need_no_program() {
    const FLANNEL: &str = r#"{"type":"flannel","delegate":{"hairpinMode":true}}"#;
    let of = |plugins: &str| format!(r#"{{"cniVersion":"1.1.0","name":"cbr0","plugins":[{plugins}]}}"#);
    let folder = Folder::new("flannel");
    let chained = r#"{"type":"portmap","capabilities":{"portMappings":true}},{"type":"bandwidth","capabilities":{"bandwidth":true}}"#;
    folder.write("10-flannel.conflist", &of(&format!("{FLANNEL},{chained}")));
    let options = Options { runs_built_in: true, ..in_dir(&folder.0) };
    assert_eq!(super::survey(&options).unwrap().missing, ["flannel"]);
    let result = r#"{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"/run/netns/a"}],"ips":[{"address":"10.1.0.5/24","interface":0}]}"#;
    let added =
        CniOutcome { addresses: vec!["10.1.0.5".into()], result: result.into(), ..CniOutcome::default() };
    let answer = added.clone();
    let (run, asked) = workers(move |_| Ok(answer.clone()));
    reactor::run(async {
        let network = Network::new(options, run);
        network.start();
        until("flannel is asked for its STATUS", || network.ready().is_ok()).await;
        network.recovered();
        let recorded = network.plan(&pod()).unwrap();
        assert_eq!((recorded.is_built_in, &recorded.built_in[..]), (false, &[1, 2][..]));
        let text = serde_json::to_string(&recorded).unwrap();
        assert_eq!(serde_json::from_str::<Recorded>(&text).unwrap(), recorded);
        assert_eq!(network.add(&recorded).await.unwrap(), added, "a pod without host ports and limits");
        network.del(&recorded, Some(result)).await.unwrap();
    });
    let asked = asked.borrow();
    let mut commands: Vec<_> = asked.iter().map(|job| job.command.clone()).collect();
    commands.dedup();
    let expected = [
        CniCommand::Status,
        CniCommand::Add { previous_result: None },
        CniCommand::Del { previous_result: Some(result.into()) },
    ];
    assert_eq!(commands, expected);
    assert!(asked.iter().all(|job| job.conflist == of(FLANNEL)), "{asked:?}");
}

/// Each part receives the result of the preceding one in ADD, and the final result in DEL.
#[test]
fn results_are_passed_between_programs_and_built_in_plugins() {
    let folder = Folder::new("walk");
    let list = r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"first"},{"type":"portmap"},{"type":"second"}]}"#;
    folder.write("1.conflist", list);
    let (run, asked) = workers(|job| {
        let result = format!(r#"{{"cniVersion":"1.0.0","plugin":{:?}}}"#, job.conflist.contains("first"));
        Ok(CniOutcome { result, ..CniOutcome::default() })
    });
    reactor::run(async {
        let network = Network::new(Options { runs_built_in: true, ..in_dir(&folder.0) }, run);
        network.recovered();
        let recorded = network.plan(&pod()).unwrap();
        assert_eq!(recorded.built_in, [1]);
        let last = network.add(&recorded).await.unwrap().result;
        network.del(&recorded, Some(&last)).await.unwrap();
        network.del(&recorded, None).await.unwrap();
    });
    let first = r#"{"cniVersion":"1.0.0","plugin":true}"#.to_owned();
    let last = Some(first.replace("true", "false"));
    let told: Vec<_> =
        asked.borrow().iter().map(|job| (job.conflist.contains("first"), job.command.clone())).collect();
    let del = |previous_result: &Option<String>| CniCommand::Del { previous_result: previous_result.clone() };
    let expected = [
        (true, CniCommand::Add { previous_result: None }),
        (false, CniCommand::Add { previous_result: Some(first) }),
        (false, del(&last)),
        (true, del(&last)),
        (false, del(&None)),
        (true, del(&None)),
    ];
    assert_eq!(told, expected);
}
