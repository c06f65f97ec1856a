//! Debian's nginx before a registry: TLS with a certificate of a throw-away authority, and where a test wants them client
//! certificates and passwords.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::host::wait_until;
use crate::registry::free_address;

/// The program: `make test` unpacks Debian's package.
const PROGRAM: &str = "nginx";

/// What a client has to show.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wants {
    /// A certificate of the same authority.
    pub certificate: bool,
    /// User `me` with password `secret`.
    pub password: bool,
}

/// A running server; ends when dropped.
pub struct Nginx {
    child: Child,
    folder: PathBuf,
    address: SocketAddr,
}

impl Nginx {
    /// Starts one in `folder/NAME` before `upstream`, at 127.0.0.1.
    pub fn start(folder: &Path, name: &str, upstream: SocketAddr, wants: Wants) -> Nginx {
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
             {}\n{}\nlocation / {{ proxy_pass http://{upstream}; proxy_set_header Host $http_host; }}\n}}\n}}\n",
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

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// One of its files: `ca.pem`, `client.pem`, `client.key`.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // Both fail only when it is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// An authority, and certificates of it for the server at 127.0.0.1 and for a client.
fn make_certificates(folder: &Path) {
    let openssl = |words: &str| {
        let made = Command::new("openssl")
            .args(words.split_whitespace())
            .current_dir(folder)
            .output()
            .expect("openssl");
        assert!(made.status.success(), "{words}: {}", String::from_utf8_lossy(&made.stderr));
    };
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(&format!(
        "req -x509 {key} -subj /CN=authority -days 2 -keyout ca.key -out ca.pem -addext keyUsage=keyCertSign"
    ));
    for (name, extensions) in [
        ("server", "subjectAltName=IP:127.0.0.1,DNS:registry.invalid\nextendedKeyUsage=serverAuth\n"),
        ("client", "subjectAltName=DNS:boat\nextendedKeyUsage=clientAuth\n"),
    ] {
        std::fs::write(folder.join("extensions"), extensions).expect("a file");
        openssl(&format!("req {key} -subj /CN={name} -keyout {name}.key -out {name}.csr"));
        openssl(&format!(
            "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out {name}.pem"
        ));
    }
}
