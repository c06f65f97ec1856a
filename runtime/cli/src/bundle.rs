//! `coracle image bundle`: makes an additional store of image archives, on the machine that builds the system's image of a node. Workers
//! unpack the archives as for an import, into a new directory with the layout of `--root`; no daemon takes part. The same archives give
//! the same bytes, names, owners, modes and times.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode, Stdio};
use std::time::SystemTime;

use coracle_client::{EXIT_USAGE, Typed, complain, describe_io, print};
use coracle_config::Config;
use coracle_filelist::{Reader, digest_of_tree};
use coracle_job::{
    Answer, ImageRecord, ImportJob, ImportSource, Job, Outcome, STORE_INDEX, STORE_INDEX_BYTES_MAX,
    StoreIndex, read_message, write_message,
};
use coracle_preflight::program;
use coracle_sandbox::collect::ordered;

/// Modes of the store's own files: only root may read images, because they have set-user-ID programs (CVE-2021-41103).
const FILE_MODE: u32 = 0o600;
const DIRECTORY_MODE: u32 = 0o700;

/// Executes the command. Exit code 1: the store was not made; 2: invalid arguments.
pub(crate) fn run(config: &Config, command: &Typed) -> ExitCode {
    let (Some(store), false) = (command.value("--store"), command.arguments.is_empty()) else {
        complain([
            "image bundle: --store DIR and archives are needed; `coracle image bundle --help` says more",
        ]);
        return ExitCode::from(EXIT_USAGE);
    };
    match make(config, Path::new(store), &command.arguments) {
        Ok(images) => {
            let name = |image: &ImageRecord| image.tags.first().unwrap_or(&image.id).clone();
            print(&images.iter().map(|image| format!("bundled {}\n", name(image))).collect::<String>())
        }
        Err(problem) => complain([format!("image bundle: {problem}")]),
    }
}

/// Makes a store of archives; returns its images by ID. After a failure there is no directory.
fn make(config: &Config, store: &Path, archives: &[String]) -> Result<Vec<ImageRecord>, String> {
    let tried = |error: io::Error| format!("{}: {}", store.display(), describe_io(&error));
    fs::create_dir(store).map_err(tried)?;
    // The worker has another working directory.
    let made = store.canonicalize().map_err(tried).and_then(|store| fill(config, &store, archives));
    if made.is_err()
        && let Err(error) = fs::remove_dir_all(store)
    {
        complain([format!("cannot remove the incomplete store {}", tried(error))]);
    }
    made
}

fn fill(config: &Config, store: &Path, archives: &[String]) -> Result<Vec<ImageRecord>, String> {
    let mut images: BTreeMap<String, ImageRecord> = BTreeMap::new();
    for archive in archives {
        let imported = import(config, store, Path::new(archive));
        for image in imported.map_err(|problem| format!("{archive}: {problem}"))? {
            match images.get_mut(&image.id) {
                Some(known) => known.add(image),
                None => drop(images.insert(image.id.clone(), image)),
            }
        }
    }
    let mut index = StoreIndex { images: images.into_values().collect(), trees: Vec::new() };
    finish(store, &mut index).map_err(|error| format!("{}: {}", store.display(), describe_io(&error)))?;
    Ok(index.images)
}

/// Lets a worker import all images of an archive.
fn import(config: &Config, store: &Path, archive: &Path) -> Result<Vec<ImageRecord>, String> {
    let described = |error: io::Error| describe_io(&error);
    let job = Job::Import(ImportJob {
        root: store.to_owned(),
        source: ImportSource::Archive(archive.canonicalize().map_err(described)?),
        limits: config.image.limits(),
        keep_blobs: false,
        is_background: false,
        serves_neighbours: false,
        policy: None,
    });
    let mut worker = process::Command::new(program(config, coracle_job::WORKER))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(described)?;
    let answered = answer(&mut worker, &job);
    // It has closed its output, or gets no further answer through.
    let ended = worker.wait().map_err(described)?;
    match answered? {
        Some(Answer::Done(Outcome::Imported { images, refused, .. })) => match refused.first() {
            Some(failure) => Err(failure.message.clone()),
            None => Ok(images),
        },
        Some(Answer::Failed(failure)) => Err(failure.message),
        _ => Err(format!("the worker ended with {ended}")),
    }
}

/// The last answer of a worker.
fn answer(worker: &mut process::Child, job: &Job) -> Result<Option<Answer>, String> {
    let (Some(mut input), Some(mut output)) = (worker.stdin.take(), worker.stdout.take()) else {
        return Ok(None);
    };
    write_message(&mut input, job).map_err(|error| error.to_string())?;
    drop(input);
    loop {
        match read_message(&mut output).map_err(|error| error.to_string())? {
            Some(Answer::Progress(_) | Answer::Waiting(_)) => {}
            last => return Ok(last),
        }
    }
}

/// Gives the store's own files one time and mode, computes the digests of layers, and writes the index.
fn finish(store: &Path, index: &mut StoreIndex) -> io::Result<()> {
    let layers = store.join("layers");
    // The digests of trees take the place of the lists, which depend on the order of names in directories and on times.
    fs::remove_dir_all(store.join("images/lists"))?;
    normalise(store, &layers)?;
    let names: BTreeSet<&String> =
        ordered(index.images.iter().flat_map(|image| &image.layers).map(|layer| &layer.name));
    let digest = |name: &String| {
        let digest = digest_of_tree(&layers.join(name), &mut Reader::new(0, &mut || ()));
        Ok((name.clone(), digest.map_err(|error| io::Error::other(error.to_string()))?))
    };
    index.trees = names.into_iter().map(digest).collect::<io::Result<_>>()?;
    let bytes = index.encode().map_err(io::Error::other)?;
    if bytes.len() as u64 > STORE_INDEX_BYTES_MAX {
        return Err(io::Error::other("too many images for one store"));
    }
    let (path, aside) = (store.join(STORE_INDEX), store.join("images/index.new"));
    let mut file = File::create_new(&aside)?;
    file.write_all(&bytes)?;
    file.set_permissions(Permissions::from_mode(FILE_MODE))?;
    file.set_modified(SystemTime::UNIX_EPOCH)?;
    file.sync_all()?;
    fs::rename(aside, path)?;
    let images = File::open(store.join("images"))?;
    images.set_modified(SystemTime::UNIX_EPOCH)?;
    images.sync_all()
}

/// Sets the times of all files to 1970 and their modes, whatever the umask was, but not of those in the layers, whose times are those of
/// the images. The root directory of a layer has that of its unpacking.
fn normalise(directory: &Path, layers: &Path) -> io::Result<()> {
    if directory.parent() != Some(layers) {
        let entries: Vec<PathBuf> =
            fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
        for path in entries {
            if path.is_dir() {
                normalise(&path, layers)?;
            } else {
                let file = File::open(path)?;
                file.set_permissions(Permissions::from_mode(FILE_MODE))?;
                file.set_modified(SystemTime::UNIX_EPOCH)?;
            }
        }
        fs::set_permissions(directory, Permissions::from_mode(DIRECTORY_MODE))?;
    }
    File::open(directory)?.set_modified(SystemTime::UNIX_EPOCH)
}
