//! coracle: the command line. It asks the running daemon, reads what that left behind, checks the host and the configuration,
//! and configures a node. `coracle serve` becomes the daemon, which is a program of its own, `coracled`.
//!
//! Started by the name `coracle-worker`, a symbolic link to this program, it is a worker of the daemon: in two files their
//! libraries would be on the node's flash twice.
//!
//! This file only chooses the command. Each runs in a process of its own, so it may block.
#![forbid(unsafe_code)]

mod bundle;
mod check;
mod cli;
mod old_images;

use std::ffi::OsStr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use cli::Command;
use coracle_client::{
    EXIT_USAGE, Typed, complain, configuration, describe_io, events, exec, image, list, logs, print, support,
    why,
};
use coracle_config::{self as config, Sources};
use coracle_preflight as preflight;
use coracle_setup::Program;

/// Name of this program.
const NAME: &str = "coracle";

fn main() -> ExitCode {
    let name = std::env::args_os().next().map(PathBuf::from);
    if name.is_some_and(|name| name.file_name() == Some(OsStr::new(coracle_job::WORKER))) {
        return coracle_worker::main();
    }
    match cli::parse(std::env::args_os().skip(1)) {
        Ok(Command::Serve(flags)) => serve(&flags),
        Ok(Command::ConfigCheck(sources)) => match config::load(&sources) {
            Ok(config) => {
                let mut mistakes = preflight::mistakes(&config);
                mistakes.extend(preflight::streaming_certificate(&config).err());
                mistakes.extend(preflight::site_key(&config).err());
                mistakes.extend(preflight::image_policy(&config).err());
                // The daemon starts with these, and leaves the bad entries out.
                let of_registries = preflight::registries(&config);
                match (mistakes.is_empty(), of_registries) {
                    (true, Ok(())) => print("no mistakes\n"),
                    (true, Err(why)) => {
                        print(&format!("no mistakes that prevent a start; of registries: {why}\n"))
                    }
                    (false, of_registries) => complain(mistakes.into_iter().chain(of_registries.err())),
                }
            }
            Err(problems) => complain(problems),
        },
        Ok(Command::ConfigStatus(command, sources)) => with_daemon(config_status, &command, &sources),
        Ok(Command::ConfigDefault) => print(&config::document()),
        Ok(Command::Version) => print(&preflight::version(NAME)),
        Ok(Command::Help(text)) => print(&text),
        Ok(Command::Check { sources, as_json }) => match config::load(&sources) {
            Ok(config) => check::run(&config, as_json),
            Err(problems) => complain(problems),
        },
        Ok(Command::List(command, sources)) => with_daemon(list::run, &command, &sources),
        Ok(Command::Events(command, sources)) => with_daemon(events::run, &command, &sources),
        Ok(Command::Logs(command, sources)) => with_daemon(logs::run, &command, &sources),
        Ok(Command::Exec(command, sources)) => with_daemon(exec::run, &command, &sources),
        Ok(Command::Image(command, sources)) if command.name == "bundle" => match config::load(&sources) {
            Ok(config) => bundle::run(&config, &command),
            Err(problems) => complain(problems),
        },
        Ok(Command::Image(command, sources)) => with_daemon(image::run, &command, &sources),
        Ok(Command::Why(command, sources)) => with_daemon(why::run, &command, &sources),
        Ok(Command::Setup(program, command, sources)) => set_up(program, &command, sources),
        Ok(Command::SupportDump(command, sources)) => support::run(&about_node(&sources), &command),
        Err(usage) => {
            complain([usage]);
            ExitCode::from(EXIT_USAGE)
        }
    }
}

/// Becomes the daemon in the directory of this program, with these flags: the process stays, so that a supervisor sees no
/// difference. Returns only if that is impossible.
fn serve(flags: &[String]) -> ExitCode {
    let program = preflight::beside(preflight::DAEMON);
    let error = std::process::Command::new(&program).args(flags).exec();
    complain([format!("start the daemon {}: {}", program.display(), describe_io(&error))])
}

/// Executes a command with the state directory of the daemon, which the configuration names. The daemon continues with the
/// configuration from before if the files have a mistake, so this is no reason not to ask it, unless the state directory is
/// unknown: the command would ask the daemon with the default one.
fn with_daemon(run: fn(&Path, &Typed) -> ExitCode, command: &Typed, sources: &Sources) -> ExitCode {
    match config::load_for_client(sources) {
        Ok((config, problems)) => {
            complain(problems);
            run(&config.state, command)
        }
        Err(problems) => {
            complain(problems);
            complain(["no daemon was asked: --state DIR names its state directory"]);
            ExitCode::from(EXIT_USAGE)
        }
    }
}

/// `coracle config status`. The files that a start would read are those beside the file that the daemon was started with.
fn config_status(state: &Path, command: &Typed) -> ExitCode {
    configuration::run(state, command, &|file| {
        config::files(&Sources { file: Some(file.to_owned()), flags: Vec::new() })
    })
}

/// Configures k3s or kubeadm for the daemon's CRI socket. With `--host-root` the socket is that of the configuration below this
/// directory. An invalid configuration prevents `enable`, but not the way back.
fn set_up(program: Program, command: &Typed, mut sources: Sources) -> ExitCode {
    let below = command.value("--host-root").map(|root| Path::new(root).join("etc/coracle/config.toml"));
    let config = match below {
        Some(file) if sources.file.is_none() && !file.is_file() => {
            sources.file = Some(file);
            Ok(config::defaults())
        }
        below => {
            sources.file = sources.file.or(below);
            config::load(&sources)
        }
    };
    let config = match config {
        Ok(config) => config,
        Err(problems) if command.name == "enable" => return complain(problems),
        Err(_) => config::defaults(),
    };
    let list = |store: &Path| old_images::list(&config, store);
    let file = sources.file.unwrap_or_else(|| config::DEFAULT_FILE.into());
    let check = |path: &str, text: &str| {
        let drop_in = file.with_file_name("conf.d").join(Path::new(path).file_name().unwrap_or_default());
        match config::load_with(&file, (&drop_in, text)) {
            Ok(config) => preflight::mistakes(&config),
            Err(problems) => problems.iter().map(ToString::to_string).collect(),
        }
    };
    coracle_setup::run(program, command, &config.listen, &check, &list)
}

/// Collects the part of a support dump that this crate supplies. An invalid configuration is replaced by the default one, and
/// its errors are added.
fn about_node(sources: &Sources) -> support::Node {
    let (config, mistakes) = config::load_valid_part(sources);
    let mistakes: String = mistakes.iter().map(|problem| format!("{problem}\n")).collect();
    support::Node {
        configuration: config::files(sources),
        texts: vec![
            ("version.txt", preflight::version(NAME)),
            ("check.txt", check::text(&config, false).map_or_else(|error| error, |(text, _)| text)),
            ("mistakes.txt", mistakes),
        ],
        root: config.root,
        state: config.state,
    }
}
