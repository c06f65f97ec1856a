//! Debian's nginx in front of a registry: TLS with a certificate of a temporary authority, and optionally
//! client certificates and passwords.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::host::wait_until;
use crate::registry::free_address;

/// Name of the program; `make test` unpacks Debian's package.
const PROGRAM: &str = "nginx";

/// The required authentication of clients.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wants {
    /// Whether a certificate of the same authority is required.
    pub certificate: bool,
    /// Whether user `me` with password `secret` is required.
    pub password: bool,
}

/// A curve and a hash, by openssl's names.
pub type Key = (&'static str, &'static str);

/// A running server; ended on drop.
pub struct Nginx {
    child: Child,
    folder: PathBuf,
    address: SocketAddr,
}

impl Nginx {
    /// Starts a server in `folder/NAME` in front of `upstream`, on 127.0.0.1.
    pub fn start(folder: &Path, name: &str, upstream: SocketAddr, wants: Wants) -> Nginx {
        Nginx::start_with(folder, name, upstream, wants, make_certificates)
    }

    /// Starts a server whose certificate is for this extended key usage, by its name in openssl.
    pub fn of_usage(folder: &Path, name: &str, upstream: SocketAddr, usage: &str) -> Nginx {
        Nginx::start_with(folder, name, upstream, Wants::default(), |folder| {
            make_certificates_of(folder, usage)
        })
    }

    /// Starts a server with a self-signed certificate for this address, like those of `openssl req -x509`;
    /// its file is `server.pem`.
    pub fn self_signed(folder: &Path, name: &str, upstream: SocketAddr, address: &str) -> Nginx {
        let wants = Wants { certificate: false, password: false };
        Nginx::start_with(folder, name, upstream, wants, |folder| {
            let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
            openssl(
                folder,
                &format!(
                    "req -x509 {key} -subj /CN=registry -days 2 -keyout server.key -out server.pem \
                     -addext subjectAltName=IP:{address}"
                ),
            );
        })
    }

    /// Starts a server whose certificate openssl makes with keys on these curves and these hashes for the authority in
    /// `ca.pem` and for the server. The certificate of the server says that it is an authority (CA:TRUE) if
    /// `is_authority` is true, and `settings` are further lines of nginx's configuration.
    pub fn signed(
        folder: &Path,
        name: &str,
        upstream: SocketAddr,
        (authority, server): (Key, Key),
        is_authority: bool,
        settings: &str,
    ) -> Nginx {
        Nginx::start_full(folder, name, upstream, Wants::default(), settings, |folder| {
            let openssl = |words: &str| openssl(folder, words);
            let key = |key: Key| format!("-newkey ec -pkeyopt ec_paramgen_curve:{} -{} -nodes", key.0, key.1);
            openssl(&format!(
                "req -x509 {} -subj /CN=authority -days 2 -keyout ca.key -out ca.pem",
                key(authority)
            ));
            let extensions = format!("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:{is_authority}\n");
            std::fs::write(folder.join("extensions"), extensions).expect("a file");
            openssl(&format!("req {} -subj /CN=server -keyout server.key -out server.csr", key(server)));
            openssl(&format!(
                "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -{} -extfile extensions \
                 -out server.pem",
                authority.1
            ));
        })
    }

    /// Starts a server with a certificate of the authority in `ca.pem` that is not valid yet, as any
    /// certificate appears to a node whose clock is in 1970.
    pub fn of_the_future(folder: &Path, name: &str, upstream: SocketAddr) -> Nginx {
        Nginx::start_with(folder, name, upstream, Wants::default(), |folder| {
            make_certificates(folder);
            let config = "[ca]\ndefault_ca = own\n[own]\ndatabase = index\nnew_certs_dir = .\nserial = serial\n\
                          default_md = sha256\npolicy = names\n[names]\ncommonName = supplied\n[server]\n\
                          subjectAltName = IP:127.0.0.1\nextendedKeyUsage = serverAuth\n";
            for (name, text) in [("ca.conf", config), ("index", ""), ("serial", "01\n")] {
                std::fs::write(folder.join(name), text).expect("a file of the authority");
            }
            openssl(
                folder,
                "ca -batch -config ca.conf -cert ca.pem -keyfile ca.key -in server.csr -out server.pem -notext \
                 -startdate 20400101000000Z -enddate 20450101000000Z -extensions server",
            );
        })
    }

    fn start_with(
        folder: &Path,
        name: &str,
        upstream: SocketAddr,
        wants: Wants,
        make_certificates: impl Fn(&Path),
    ) -> Nginx {
        Nginx::start_full(folder, name, upstream, wants, "", make_certificates)
    }

    fn start_full(
        folder: &Path,
        name: &str,
        upstream: SocketAddr,
        wants: Wants,
        settings: &str,
        make_certificates: impl Fn(&Path),
    ) -> Nginx {
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder).expect("a folder for nginx");
        make_certificates(&folder);
        let address = free_address();
        let certificate = match wants.certificate {
            true => "ssl_client_certificate ca.pem; ssl_verify_client on;",
            false => "",
        };
        let password = match wants.password {
            true => "auth_basic boats; auth_basic_user_file users;",
            false => "",
        };
        std::fs::write(folder.join("users"), "me:{PLAIN}secret\n").expect("the users");
        let here = folder.display();
        let config = format!(
            "daemon off; master_process off; pid {here}/pid; error_log {here}/log;\nevents {{}}\nhttp {{\n\
             access_log {here}/access;\nclient_body_temp_path {here}/body; proxy_temp_path {here}/proxy;\n\
             fastcgi_temp_path {here}/f; uwsgi_temp_path {here}/u; scgi_temp_path {here}/s;\n\
             server {{\nlisten {address} ssl;\nssl_certificate {here}/server.pem; ssl_certificate_key {here}/server.key;\n\
             {}\n{}\n{settings}\nlocation / {{ proxy_pass http://{upstream}; proxy_set_header Host $http_host; }}\n}}\n}}\n",
            certificate.replace("ca.pem", &format!("{here}/ca.pem")),
            password.replace("users", &format!("{here}/users")),
        );
        std::fs::write(folder.join("nginx.conf"), config).expect("nginx's configuration");
        let child = Command::new(PROGRAM)
            .arg("-p")
            .arg(&folder)
            .arg("-e")
            .arg(folder.join("log"))
            .arg("-c")
            .arg(folder.join("nginx.conf"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{PROGRAM}: {error}; tests/tools/install brings it"));
        wait_until("nginx listens", || std::net::TcpStream::connect(address).is_ok());
        Nginx { child, folder, address }
    }

    /// The address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Path of one of the server's files: `ca.pem`, `client.pem`, `client.key`.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // Both fail only if it has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn openssl(folder: &Path, words: &str) {
    let made =
        Command::new("openssl").args(words.split_whitespace()).current_dir(folder).output().expect("openssl");
    assert!(made.status.success(), "{words}: {}", String::from_utf8_lossy(&made.stderr));
}

/// Creates an authority, and its certificates for the server at 127.0.0.1 and for a client.
fn make_certificates(folder: &Path) {
    make_certificates_of(folder, "serverAuth");
}

fn make_certificates_of(folder: &Path, usage: &str) {
    let openssl = |words: &str| openssl(folder, words);
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(&format!(
        "req -x509 {key} -subj /CN=authority -days 2 -keyout ca.key -out ca.pem -addext keyUsage=keyCertSign"
    ));
    for (name, extensions) in [
        ("server", format!("subjectAltName=IP:127.0.0.1,DNS:registry.invalid\nextendedKeyUsage={usage}\n")),
        ("client", "subjectAltName=DNS:boat\nextendedKeyUsage=clientAuth\n".to_owned()),
    ] {
        std::fs::write(folder.join("extensions"), extensions).expect("a file");
        openssl(&format!("req {key} -subj /CN={name} -keyout {name}.key -out {name}.csr"));
        openssl(&format!(
            "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out {name}.pem"
        ));
    }
}
