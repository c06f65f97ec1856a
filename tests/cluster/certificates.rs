//! Certificates and kubeconfigs of a cluster, from the machine's `openssl`: one authority signs all of them, as in a
//! cluster that a person sets up. They live as long as the cluster's directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Validity in days.
const DAYS: &str = "7";

/// Directory with the certificates of a cluster.
pub(crate) struct Certificates {
    folder: PathBuf,
}

impl Certificates {
    /// Creates the authority, and the key pair that signs tokens of service accounts.
    pub(crate) fn new(folder: PathBuf) -> Certificates {
        fs::create_dir_all(&folder).expect("a folder");
        let certificates = Certificates { folder };
        let (key, certificate) = (certificates.path("ca.key"), certificates.path("ca.crt"));
        let key_usage = "keyUsage=critical,digitalSignature,keyCertSign,cRLSign";
        certificates.request("/CN=cluster-ca", &key, &certificate, &["-addext", key_usage]);
        openssl(
            &["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out"],
            &certificates.path("sa.key"),
        );
        let key = certificates.path("sa.key").display().to_string();
        openssl(&["ec", "-in", &key, "-pubout", "-out"], &certificates.path("sa.pub"));
        certificates
    }

    /// Path of a file of these certificates.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Issues `NAME.crt` with `NAME.key`. `subject` is like `/O=GROUP/CN=USER`, `names` like `DNS:localhost`.
    pub(crate) fn issue(&self, name: &str, subject: &str, names: &[&str]) {
        let (key, certificate) = (self.path(&format!("{name}.key")), self.path(&format!("{name}.crt")));
        let (ca, ca_key) =
            (self.path("ca.crt").display().to_string(), self.path("ca.key").display().to_string());
        let alternatives = format!("subjectAltName={}", names.join(","));
        let mut more =
            vec!["-CA", &ca, "-CAkey", &ca_key, "-addext", "extendedKeyUsage=serverAuth,clientAuth"];
        more.extend(["-addext", "basicConstraints=critical,CA:FALSE"]);
        if !names.is_empty() {
            more.extend(["-addext", &alternatives]);
        }
        self.request(subject, &key, &certificate, &more);
    }

    fn request(&self, subject: &str, key: &Path, certificate: &Path, more: &[&str]) {
        let key = key.display().to_string();
        let mut words =
            vec!["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
        words.extend(["-days", DAYS, "-subj", subject, "-keyout", &key]);
        words.extend(more);
        words.push("-out");
        openssl(&words, certificate);
    }

    /// Issues a client certificate and writes `NAME.kubeconfig` that uses it; returns its path.
    pub(crate) fn kubeconfig(&self, name: &str, subject: &str, server: &str) -> PathBuf {
        self.issue(name, subject, &[]);
        let file = self.path(&format!("{name}.kubeconfig"));
        let at = self.folder.display();
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: cluster\n\
             clusters: [{{name: cluster, cluster: {{server: '{server}', certificate-authority: {at}/ca.crt}}}}]\n\
             users: [{{name: user, user: {{client-certificate: {at}/{name}.crt, client-key: {at}/{name}.key}}}}]\n\
             contexts: [{{name: cluster, context: {{cluster: cluster, user: user}}}}]\n"
        );
        fs::write(&file, text).expect("a kubeconfig");
        file
    }
}

/// Runs openssl with these arguments and a file to write.
fn openssl(words: &[&str], output: &Path) {
    let result = Command::new("openssl")
        .args(words)
        .arg(output)
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|error| panic!("openssl: {error}; `tests/tools/install cluster` installs it"));
    assert!(result.status.success(), "openssl {words:?}: {}", String::from_utf8_lossy(&result.stderr));
}
