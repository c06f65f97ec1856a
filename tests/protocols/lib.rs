//! The Rust code of the CRI, of NRI and of ttrpc's envelope is generated from their `.proto` files, beside which it is kept. A compiler of
//! protocols is thirty crates, which each build of the programs and of the tests' clients would need otherwise. The test compares what is
//! kept with what is generated now; `make protocols` writes it. Comments are in the `.proto` files only.
#![forbid(unsafe_code)]

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::fs;
    use std::path::{Path, PathBuf};

    type Outcome = Result<(), Box<dyn Error>>;

    /// Compares the files in `fresh` with those in `kept`, or writes them there.
    fn compare(fresh: &Path, kept: &Path) -> Outcome {
        let is_update = std::env::var_os("UPDATE").is_some_and(|value| !value.is_empty());
        for entry in fs::read_dir(fresh)? {
            let entry = entry?;
            let (code, path) = (fs::read_to_string(entry.path())?, kept.join(entry.file_name()));
            if is_update {
                fs::write(&path, code)?;
            } else if fs::read_to_string(&path).ok() != Some(code) {
                return Err(format!("{} is not what is generated: make protocols", path.display()).into());
            }
        }
        Ok(())
    }

    /// The messages of `proto`, and by tonic's generator what calls its services, if it has any.
    fn generate(directory: &Path, proto: &str, clients_of: Option<&str>, into: &Path) -> Outcome {
        let folder = directory.join(proto).parent().map(PathBuf::from).ok_or("no directory")?;
        let files = protox::compile([directory.join(proto)], [folder])?;
        fs::create_dir_all(into)?;
        match clients_of {
            // The messages are those of the daemon.
            Some(package) => tonic_prost_build::configure()
                .build_server(false)
                .build_transport(false)
                .extern_path(package, "crate::cri::proto")
                .disable_comments(["."])
                .out_dir(into)
                .compile_fds(files)?,
            // Maps are ordered, so that an adjustment always has the same encoding.
            None => prost_build::Config::new()
                .btree_map([".nri"])
                .disable_comments(["."])
                .out_dir(into)
                .compile_fds(files)?,
        }
        Ok(())
    }

    #[test]
    fn the_code_that_is_kept_is_generated_from_the_protocols() -> Outcome {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize()?;
        let scratch = std::env::temp_dir().join(format!("coracle-protocols-{}", std::process::id()));
        let made = [
            ("runtime/daemon/proto/cri.proto", None, "runtime/daemon/proto"),
            ("runtime/daemon/proto/cri.proto", Some(".runtime.v1"), "tests/proto"),
            ("nri/proto/nri.proto", None, "nri/proto"),
            ("tests/proto/ttrpc.proto", None, "tests/proto"),
        ];
        let compared = made.iter().enumerate().try_for_each(|(number, (proto, clients_of, kept))| {
            let fresh = scratch.join(number.to_string());
            generate(&directory, proto, *clients_of, &fresh)?;
            compare(&fresh, &directory.join(kept))
        });
        fs::remove_dir_all(&scratch)?;
        compared
    }
}
