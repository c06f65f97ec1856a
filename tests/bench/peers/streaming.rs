//! Throughput of exec and port-forward with crictl: one gibibyte from an exec, one to an exec, and one in
//! both directions through a port-forward. The best of three runs is reported, because disturbances can only
//! make a run slower.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coracle_tests::host::wait_for;
use coracle_tests::request::{container, host_pod};

use super::ROUNDS;
use super::side::{Side, Sides};

/// Number of transferred bytes: 1 GiB.
const BYTES: u64 = 1 << 30;

/// A runtime's pod, its container, and the port on which the container echoes.
struct Target {
    pod_id: String,
    container_id: String,
    port: u16,
}

/// Name and implementation of a measurement.
type Way = (&'static str, fn(&Side<'_>, &Target));

/// Prints the rows.
pub(crate) fn measure(sides: &Sides, image: &str) {
    const WAYS: [Way; 3] =
        [("exec, out", out), ("exec, in", into), ("port-forward, to and fro at once", to_and_fro)];
    let targets = sides.each(|side| start(side, image));
    let mut best = [[f64::MAX; 2]; WAYS.len()];
    for _ in 0..ROUNDS {
        for ((_, way), best) in WAYS.iter().zip(&mut best) {
            for ((side, target), best) in sides.both().iter().zip(&targets).zip(best) {
                let begin = Instant::now();
                way(side, target);
                *best = best.min(begin.elapsed().as_secs_f64());
            }
        }
    }
    for ((what, _), [ours, theirs]) in WAYS.iter().zip(best) {
        let rate = |seconds: f64| BYTES as f64 / seconds / 1e6;
        let (mine, others) = (rate(ours), rate(theirs));
        println!("| {what}, crictl | {mine:.0} MB/s | {others:.0} MB/s | {:.1} x |", mine / others);
    }
    for (side, target) in sides.both().iter().zip(&targets) {
        side.cri.remove_pod(&target.pod_id);
    }
}

fn start(side: &Side<'_>, image: &str) -> Target {
    let port = free_port();
    let pod = side.placed(host_pod("streaming"));
    let pod_id = side.cri.run_pod(&pod);
    let config = container("echo", image, &["echo", &format!("127.0.0.1:{port}")], &pod);
    let container_id = side.cri.run_container(&pod_id, &config, &pod);
    Target { pod_id, container_id, port }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback");
    listener.local_addr().expect("it is bound").port()
}

fn crictl(side: &Side<'_>, words: &[&str]) -> Command {
    let endpoint = format!("unix://{}", side.socket.display());
    let mut command = Command::new("crictl");
    command
        .args(["--config", "/dev/null", "--timeout", "60s"])
        .args(["--runtime-endpoint", &endpoint, "--image-endpoint", &endpoint])
        .args(words)
        .stdin(Stdio::null())
        .stderr(Stdio::null());
    command
}

fn ends_well(mut child: Child) {
    let status = child.wait().expect("crictl is our child");
    assert!(status.success(), "crictl ended with {status}");
}

fn out(side: &Side<'_>, target: &Target) {
    let words = ["exec", &target.container_id, "/probe", "blast", &BYTES.to_string()];
    let mut child = crictl(side, &words).stdout(Stdio::piped()).spawn().expect("crictl starts");
    let bytes = io::copy(&mut child.stdout.take().expect("a pipe"), &mut io::sink()).expect("its output");
    ends_well(child);
    assert_eq!(bytes, BYTES, "what came out");
}

fn into(side: &Side<'_>, target: &Target) {
    let words = ["exec", "--interactive", &target.container_id, "/probe", "sink"];
    let mut command = crictl(side, &words);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("crictl starts");
    let mut input = child.stdin.take().expect("a pipe");
    io::copy(&mut io::repeat(0).take(BYTES), &mut input).expect("its input");
    drop(input);
    ends_well(child);
}

fn to_and_fro(side: &Side<'_>, target: &Target) {
    let port = free_port();
    let words = ["port-forward", &target.pod_id, &format!("{port}:{}", target.port)];
    let mut child = crictl(side, &words).stdout(Stdio::null()).spawn().expect("crictl starts");
    let mut stream = wait_for("crictl forwards", || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok());
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
    let mut writer = stream.try_clone().expect("a second handle");
    let bytes = std::thread::scope(|scope| {
        scope.spawn(move || {
            io::copy(&mut io::repeat(0).take(BYTES), &mut writer).expect("it takes all");
            writer.flush().and_then(|()| writer.shutdown(Shutdown::Write)).expect("its end");
        });
        io::copy(&mut stream, &mut io::sink()).expect("what comes back")
    });
    // It forwards until it is killed; an error means that it has already ended.
    let _ = child.kill();
    let _ = child.wait();
    assert_eq!(bytes, BYTES, "what came back");
}
