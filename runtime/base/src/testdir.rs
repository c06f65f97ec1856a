//! Temporary directories for unit tests that need real files.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory for one test; removed on drop.
pub struct TestDir(PathBuf);

impl TestDir {
    /// Creates the directory below the system's directory for temporary files; `about` becomes part of its
    /// name.
    pub fn new(about: &str) -> TestDir {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("coracle-{about}-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        TestDir(path)
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes an executable shell script, in which `$D` is this directory. A child process writes the file:
    /// if this process had the file open for writing, a child that another test forks at that moment would
    /// inherit the descriptor, and executing the script would fail (ETXTBSY).
    pub fn script(&self, name: &str, script: &str) -> PathBuf {
        let path = self.0.join(name);
        let text = format!("#!/bin/sh\nD={}\n{script}\n", self.0.display());
        let write = r#"printf %s "$1" > "$0" && chmod 755 "$0""#;
        let mut shell = std::process::Command::new("/bin/sh");
        let mut child = shell.args(["-c", write]).arg(&path).arg(text).spawn().unwrap();
        assert!(child.wait().unwrap().success());
        path
    }
}

impl Drop for TestDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
