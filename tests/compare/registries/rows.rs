//! The oddities.

use std::io::Write;
use std::time::Duration;

use super::server::{Framing, Kind, Reply, Request};
use super::{BASIC, PASSWORD, USER};

/// Changes an answer.
pub(super) type Script = fn(&Request, &mut Reply);

/// One oddity.
pub(super) struct Row {
    /// The name, which never changes.
    pub(super) name: &'static str,
    pub(super) script: Script,
    /// Host of the image's name, as in `hosts`.
    pub(super) home: &'static str,
    /// A hosts.toml of both sides, in which HOME and OTHER stand for the two hosts, TLSHOST for the one with TLS and CAFILE for its
    /// authority.
    pub(super) hosts: &'static str,
    pub(super) has_credentials: bool,
    pub(super) is_big: bool,
    pub(super) is_slow: bool,
}

const fn row(name: &'static str, script: Script) -> Row {
    Row { name, script, home: "HOME", hosts: "", has_credentials: false, is_big: false, is_slow: false }
}

/// With user and password.
const fn login(name: &'static str, script: Script) -> Row {
    Row { has_credentials: true, ..row(name, script) }
}

/// A row with a large layer.
const fn big(name: &'static str, script: Script) -> Row {
    Row { is_big: true, ..row(name, script) }
}

/// A row that a client may try for seconds.
const fn slow(row: Row) -> Row {
    Row { is_slow: true, ..row }
}

const fn hosts(name: &'static str, hosts: &'static str, script: Script) -> Row {
    Row { hosts, has_credentials: true, ..row(name, script) }
}

/// A registry with TLS.
const fn tls(name: &'static str, hosts: &'static str, script: Script) -> Row {
    Row { home: "TLSHOST", hosts, ..row(name, script) }
}

/// A registry with TLS that wants a user and a password.
const fn tls_login(name: &'static str, script: Script) -> Row {
    Row { has_credentials: true, ..tls(name, VERIFIED, script) }
}

/// The hosts.toml of a registry with TLS.
const VERIFIED: &str = "server = \"https://TLSHOST\"\nca = \"CAFILE\"\n";

const BEARER: &str = r#"Bearer realm="http://HOME/token",service="odd",scope="repository:odd/x:pull""#;

pub(super) const ROWS: &[Row] = &[
    row("plain", |_, _| ()),
    login("plain with credentials", |_, _| ()),
    // Challenges.
    row("bearer", |q, r| demand(q, r, "Bearer tok", &[BEARER])),
    login("bearer with credentials", |q, r| {
        demand(q, r, "Bearer tok", &[BEARER]);
        token_needs(q, r, BASIC);
    }),
    login("bearer whose service refuses the credentials", |q, r| {
        demand(q, r, "Bearer tok", &[BEARER]);
        token_needs(q, r, "Basic other");
    }),
    login("bearer of a service that takes the credentials by POST only", |q, r| {
        demand(q, r, "Bearer tok", &[BEARER]);
        token_needs(q, r, BASIC);
        if q.kind == Kind::Token && q.form.is_empty() {
            r.become_status("405 Method Not Allowed", "{}");
        }
    }),
    row("bearer without quotes", |q, r| {
        demand(
            q,
            r,
            "Bearer tok",
            &["Bearer realm=http://HOME/token,service=odd,scope=repository:odd/x:pull"],
        );
    }),
    row("bearer in lower case", |q, r| {
        demand(q, r, "Bearer tok", &[r#"bearer REALM="http://HOME/token",SERVICE="odd""#]);
    }),
    row("bearer in upper case", |q, r| {
        demand(q, r, "Bearer tok", &[r#"BEARER realm="http://HOME/token",service="odd""#]);
    }),
    row("bearer with blanks", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer  realm="http://HOME/token" , service="odd" ,scope="x y""#]);
    }),
    row("bearer with blanks around =", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer realm = "http://HOME/token", service = "odd""#]);
    }),
    row("bearer with an escaped quote", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer realm="http://HOME/token",service="o\"dd""#]);
    }),
    row("bearer with a comma in a value", |q, r| {
        demand(
            q,
            r,
            "Bearer tok",
            &[r#"Bearer service="a,b",realm="http://HOME/token",scope="repository:a:pull,push""#],
        );
    }),
    row("bearer with unknown parameters", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer x=y,realm="http://HOME/token",odd="z""#]);
    }),
    // Alone, because containerd gives such a challenge another meaning after a request that it repeats.
    slow(row("bearer with an error", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer realm="http://HOME/token",error="invalid_token""#]);
    })),
    row("bearer with a comma at the end", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer realm="http://HOME/token","#]);
    }),
    row("bearer without scope", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer realm="http://HOME/token",service="odd""#]);
    }),
    row("bearer without service", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer realm="http://HOME/token""#])
    }),
    row("bearer without realm", |q, r| demand(q, r, "Bearer tok", &[r#"Bearer service="odd""#])),
    row("bearer with an empty realm", |q, r| demand(q, r, "Bearer tok", &[r#"Bearer realm="""#])),
    row("bearer with a relative realm", |q, r| demand(q, r, "Bearer tok", &[r#"Bearer realm="/token""#])),
    row("bearer with a realm that has a query", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer realm="http://HOME/token?account=x",service="odd""#]);
    }),
    login("bearer with a realm of the other host", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer realm="http://OTHER/token",service="odd""#]);
    }),
    row("challenge missing", |q, r| demand(q, r, "Bearer tok", &[])),
    row("challenge empty", |q, r| demand(q, r, "Bearer tok", &[""])),
    row("challenge of an unknown scheme", |q, r| demand(q, r, "Bearer tok", &["Negotiate"])),
    row("challenges in two fields", |q, r| demand(q, r, "Bearer tok", &["Negotiate", BEARER])),
    row("challenges in two fields, bearer first", |q, r| demand(q, r, "Bearer tok", &[BEARER, "Negotiate"])),
    row("challenges of basic and bearer", |q, r| demand(q, r, "Bearer tok", &[r#"Basic realm="x""#, BEARER])),
    login("challenges of basic and bearer with credentials", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Basic realm="x""#, BEARER]);
    }),
    row("challenges in one field", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Basic realm="x", Bearer realm="http://HOME/token",service="odd""#]);
    }),
    row("challenges in one field, bearer first", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer realm="http://HOME/token",service="odd", Basic realm="x""#]);
    }),
    login("basic", |q, r| demand(q, r, BASIC, &[r#"Basic realm="odd""#])),
    login("basic without realm", |q, r| demand(q, r, BASIC, &["Basic"])),
    login("basic in lower case", |q, r| demand(q, r, BASIC, &["basic realm=odd"])),
    login("basic with charset", |q, r| demand(q, r, BASIC, &[r#"Basic realm="odd", charset="UTF-8""#])),
    row("basic without credentials", |q, r| demand(q, r, BASIC, &[r#"Basic realm="odd""#])),
    login("basic refused", |q, r| demand(q, r, "Basic other", &[r#"Basic realm="odd""#])),
    row("bearer for blobs only", |q, r| {
        if q.kind == Kind::Blob {
            demand(q, r, "Bearer tok", &[BEARER]);
        }
    }),
    row("bearer for manifests only", |q, r| {
        if q.kind == Kind::Manifest {
            demand(q, r, "Bearer tok", &[BEARER]);
        }
    }),
    row("bearer for GET only", |q, r| {
        if !q.is_head {
            demand(q, r, "Bearer tok", &[BEARER]);
        }
    }),
    row("403 instead of 401", |q, r| {
        if q.kind != Kind::Token && q.authorization().is_empty() {
            r.become_status("403 Forbidden", "{}");
            r.header("WWW-Authenticate", fill(q, BEARER));
        }
    }),
    // Tokens.
    row("token as access_token only", |q, r| token(q, r, r#"{"access_token":"tok"}"#)),
    row("token as token only", |q, r| token(q, r, r#"{"token":"tok"}"#)),
    login("token as token only with credentials", |q, r| token(q, r, r#"{"token":"tok"}"#)),
    login("token as access_token only with credentials", |q, r| token(q, r, r#"{"access_token":"tok"}"#)),
    row("token empty beside access_token", |q, r| token(q, r, r#"{"token":"","access_token":"tok"}"#)),
    row("token null beside access_token", |q, r| token(q, r, r#"{"token":null,"access_token":"tok"}"#)),
    row("token and another access_token", |q, r| token(q, r, r#"{"token":"tok","access_token":"no"}"#)),
    row("token neither", |q, r| token(q, r, r"{}")),
    row("token of another type", |q, r| token(q, r, r#"{"token":5}"#)),
    row("token names in upper case", |q, r| token(q, r, r#"{"TOKEN":"tok"}"#)),
    row("token expired", |q, r| {
        token(q, r, r#"{"token":"tok","expires_in":0,"issued_at":"2001-01-01T00:00:00Z"}"#)
    }),
    row("token with a negative time", |q, r| token(q, r, r#"{"token":"tok","expires_in":-5}"#)),
    row("token with a time as text", |q, r| token(q, r, r#"{"token":"tok","expires_in":"300"}"#)),
    row("token with a fraction of time", |q, r| token(q, r, r#"{"token":"tok","expires_in":300.5}"#)),
    row("token with an odd date", |q, r| token(q, r, r#"{"token":"tok","issued_at":"yesterday"}"#)),
    row("token with an empty date", |q, r| token(q, r, r#"{"token":"tok","issued_at":""}"#)),
    row("token with unknown members", |q, r| token(q, r, r#"{"x":[1,{"y":null}],"token":"tok"}"#)),
    row("token twice", |q, r| token(q, r, r#"{"token":"no","token":"tok"}"#)),
    row("token no JSON", |q, r| token(q, r, "tok")),
    row("token after a byte order mark", |q, r| token(q, r, "\u{feff}{\"token\":\"tok\"}")),
    row("strict: token before other text", |q, r| token(q, r, "{\"token\":\"tok\"} x")),
    row("token with line ends", |q, r| token(q, r, "\r\n {\r\n\"token\" : \"tok\"\r\n}\r\n")),
    row("token of type text/html", |q, r| {
        token(q, r, r#"{"token":"tok"}"#);
        if q.kind == Kind::Token {
            r.set("Content-Type", Some("text/html"));
        }
    }),
    row("token with status 201", |q, r| token_status(q, r, "201 Created")),
    row("token with status 204", |q, r| token_status(q, r, "204 No Content")),
    row("token with status 403", |q, r| token_status(q, r, "403 Forbidden")),
    row("token with status 404", |q, r| token_status(q, r, "404 Not Found")),
    slow(row("token with status 500", |q, r| token_status(q, r, "500 Internal Server Error"))),
    row("token with status 503 once", |q, r| {
        demand(q, r, "Bearer tok", &[BEARER]);
        if q.kind == Kind::Token && q.earlier == 0 {
            r.become_status("503 Service Unavailable", "{}");
        }
    }),
    login("token by GET only", |q, r| {
        demand(q, r, "Bearer tok", &[BEARER]);
        if q.kind == Kind::Token && !q.head.first.starts_with("GET") {
            r.become_status("405 Method Not Allowed", "");
        }
    }),
    login("token by POST only", |q, r| {
        demand(q, r, "Bearer tok", &[BEARER]);
        let has_form = q.form.contains(&format!("username={USER}")) && q.form.contains(PASSWORD);
        if q.kind == Kind::Token && !has_form {
            r.become_status("405 Method Not Allowed", "");
        }
    }),
    login("token redirected", |q, r| redirect_token(q, r, "302 Found", "/token2")),
    login("token redirected with 307", |q, r| redirect_token(q, r, "307 Temporary Redirect", "/token2")),
    login("token redirected with 308", |q, r| redirect_token(q, r, "308 Permanent Redirect", "/token2")),
    login("token redirected to the other host", |q, r| {
        redirect_token(q, r, "302 Found", "http://OTHER/token2");
    }),
    row("a new token for each request", |q, r| {
        demand(q, r, &format!("Bearer tok{}", q.earlier), &[BEARER]);
        if q.kind == Kind::Token {
            r.body = br#"{"token":"tok0"}"#.to_vec();
        }
    }),
    // Statuses.
    row("manifest 404", |q, r| fail(q, r, Kind::Manifest, usize::MAX, "404 Not Found")),
    row("manifest 404 without a body", |q, r| {
        fail(q, r, Kind::Manifest, usize::MAX, "404 Not Found");
        if q.kind == Kind::Manifest {
            r.body.clear();
        }
    }),
    row("blob 404", |q, r| fail(q, r, Kind::Blob, usize::MAX, "404 Not Found")),
    row("blob 403", |q, r| fail(q, r, Kind::Blob, usize::MAX, "403 Forbidden")),
    row("manifest 429 once", |q, r| fail(q, r, Kind::Manifest, 1, "429 Too Many Requests")),
    row("manifest 503 once", |q, r| fail(q, r, Kind::Manifest, 1, "503 Service Unavailable")),
    row("manifest 500 once", |q, r| fail(q, r, Kind::Manifest, 1, "500 Internal Server Error")),
    row("manifest 502 once", |q, r| fail(q, r, Kind::Manifest, 1, "502 Bad Gateway")),
    row("manifest 408 once", |q, r| fail(q, r, Kind::Manifest, 1, "408 Request Timeout")),
    row("blob 429 once", |q, r| fail(q, r, Kind::Blob, 1, "429 Too Many Requests")),
    row("blob 503 once", |q, r| fail(q, r, Kind::Blob, 1, "503 Service Unavailable")),
    row("blob 500 once", |q, r| fail(q, r, Kind::Blob, 1, "500 Internal Server Error")),
    row("blob 504 once", |q, r| fail(q, r, Kind::Blob, 1, "504 Gateway Timeout")),
    row("blob 429 once with a date", |q, r| {
        let is_first = q.kind == Kind::Blob && q.earlier == 0;
        fail(q, r, Kind::Blob, 1, "429 Too Many Requests");
        if is_first {
            r.set("Retry-After", Some("Sun, 06 Nov 1994 08:49:37 GMT"));
        }
    }),
    slow(row("blob 503 always", |q, r| fail(q, r, Kind::Blob, usize::MAX, "503 Service Unavailable"))),
    row("manifest 200 without reason", |_, r| {
        r.status = r.status.split(' ').next().unwrap_or_default().into()
    }),
    row("manifest 203", |q, r| {
        if q.kind == Kind::Manifest {
            r.status = "203 Non-Authoritative Information".into();
        }
    }),
    row("blob 203", |q, r| {
        if q.kind == Kind::Blob {
            r.status = "203 Non-Authoritative Information".into();
        }
    }),
    row("status out of range", |q, r| {
        if q.kind == Kind::Blob {
            r.status = "299 Odd".into();
        }
    }),
    row("ping 404", |q, r| fail(q, r, Kind::Ping, usize::MAX, "404 Not Found")),
    row("ping 500", |q, r| fail(q, r, Kind::Ping, usize::MAX, "500 Internal Server Error")),
    // HEAD.
    row("HEAD 405", |q, r| head(q, r, "405 Method Not Allowed")),
    row("HEAD 404", |q, r| head(q, r, "404 Not Found")),
    row("HEAD 501", |q, r| head(q, r, "501 Not Implemented")),
    row("HEAD 401 without a challenge", |q, r| head(q, r, "401 Unauthorized")),
    row("HEAD 403", |q, r| head(q, r, "403 Forbidden")),
    row("HEAD 400", |q, r| head(q, r, "400 Bad Request")),
    row("HEAD without length", |q, r| {
        if q.is_head {
            r.framing = Framing::UntilClose;
        }
    }),
    row("HEAD with length 0", |q, r| {
        if q.is_head {
            r.body.clear();
        }
    }),
    // Redirects.
    login("manifest redirected 301", |q, r| {
        redirect(q, r, Kind::Manifest, "301 Moved Permanently", "http://OTHERPATH")
    }),
    login("manifest redirected 302", |q, r| redirect(q, r, Kind::Manifest, "302 Found", "http://OTHERPATH")),
    login("manifest redirected 307", |q, r| {
        redirect(q, r, Kind::Manifest, "307 Temporary Redirect", "http://OTHERPATH")
    }),
    login("blob redirected 301", |q, r| {
        redirect(q, r, Kind::Blob, "301 Moved Permanently", "http://OTHERPATH")
    }),
    login("blob redirected 302", |q, r| redirect(q, r, Kind::Blob, "302 Found", "http://OTHERPATH")),
    login("blob redirected 303", |q, r| redirect(q, r, Kind::Blob, "303 See Other", "http://OTHERPATH")),
    login("blob redirected 307", |q, r| {
        redirect(q, r, Kind::Blob, "307 Temporary Redirect", "http://OTHERPATH")
    }),
    login("blob redirected 308", |q, r| {
        redirect(q, r, Kind::Blob, "308 Permanent Redirect", "http://OTHERPATH")
    }),
    login("blob redirected 300", |q, r| {
        redirect(q, r, Kind::Blob, "300 Multiple Choices", "http://OTHERPATH")
    }),
    login("blob redirected 305", |q, r| redirect(q, r, Kind::Blob, "305 Use Proxy", "http://OTHERPATH")),
    login("blob redirected with basic", |q, r| {
        if !q.is_other {
            demand(q, r, BASIC, &[r#"Basic realm="odd""#]);
            if q.authorization() == BASIC {
                redirect(q, r, Kind::Blob, "307 Temporary Redirect", "http://OTHERPATH");
            }
        }
    }),
    login("blob redirected with bearer", |q, r| {
        if !q.is_other {
            demand(q, r, "Bearer tok", &[BEARER]);
            if q.authorization() == "Bearer tok" {
                redirect(q, r, Kind::Blob, "307 Temporary Redirect", "http://OTHERPATH");
            }
        }
    }),
    login("strict: blob redirected to a host that asks for credentials", |q, r| {
        redirect(q, r, Kind::Blob, "307 Temporary Redirect", "http://OTHERPATH");
        if q.is_other {
            ask(q, r, BASIC, &[r#"Basic realm="odd""#]);
        }
    }),
    row("blob redirected to an absolute path", |q, r| local(q, r, "/raw/NAME")),
    row("blob redirected to a relative path", |q, r| local(q, r, "../../raw/NAME")),
    row("blob redirected to a path without scheme", |q, r| local(q, r, "//OTHER/raw/NAME")),
    row("blob redirected to a query", |q, r| local(q, r, "/raw/NAME?a=b&c=%2F|d#part")),
    row("blob redirected with blanks", |q, r| local(q, r, " /raw/NAME ")),
    row("blob redirected to letters outside ASCII", |q, r| local(q, r, "/grö/raw/NAME")),
    row("blob redirected to upper case scheme", |q, r| local(q, r, "HTTP://OTHER/raw/NAME")),
    row("blob redirected with a user in the URL", |q, r| local(q, r, "http://u:p@OTHER/raw/NAME")),
    row("blob redirected to another scheme", |q, r| local(q, r, "ftp://OTHER/raw/NAME")),
    row("blob redirected to nothing", |q, r| local(q, r, "")),
    row("blob redirected without Location", |q, r| {
        local(q, r, "");
        r.set("Location", None);
    }),
    row("blob redirected with two Locations", |q, r| {
        local(q, r, "/raw/NAME");
        if r.status.starts_with("307") {
            r.header("Location", "/nowhere");
        }
    }),
    row("blob redirected in a loop", |q, r| {
        if q.kind == Kind::Blob {
            let path = q.path().to_owned();
            r.become_status("307 Temporary Redirect", "");
            r.header("Location", path);
        }
    }),
    row("blob redirected 8 times", |q, r| chain(q, r, 8)),
    row("blob redirected 12 times", |q, r| chain(q, r, 12)),
    row("ping redirected", |q, r| {
        redirect(q, r, Kind::Ping, "301 Moved Permanently", "http://OTHERPATH");
    }),
    // Bodies and header fields.
    row("chunked", |_, r| r.framing = Framing::Chunked),
    row("no length", |_, r| r.framing = Framing::UntilClose),
    row("manifest without length", |q, r| {
        if q.kind == Kind::Manifest {
            r.framing = Framing::UntilClose;
        }
    }),
    slow(row("manifest with too small a length", |q, r| wrong_length(q, r, Kind::Manifest, -5))),
    slow(row("strict: manifest with too big a length", |q, r| wrong_length(q, r, Kind::Manifest, 5))),
    slow(row("blob with too small a length", |q, r| wrong_length(q, r, Kind::Blob, -5))),
    slow(row("strict: blob with too big a length", |q, r| wrong_length(q, r, Kind::Blob, 5))),
    row("HTTP/1.0", |_, r| {
        r.version = "HTTP/1.0";
        r.closes = true;
    }),
    row("HTTP/1.0 without length", |_, r| {
        r.version = "HTTP/1.0";
        r.framing = Framing::UntilClose;
    }),
    row("closed after each answer", |_, r| r.closes = true),
    row("lines that end with LF", |_, r| r.line_end = "\n"),
    row("100 before the answer", |_, r| r.prefix = "HTTP/1.1 100 Continue\r\n\r\n"),
    row("103 before the answer", |_, r| r.prefix = "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"),
    row("field names in lower case", |_, r| {
        r.headers.iter_mut().for_each(|(name, _)| *name = name.to_ascii_lowercase());
    }),
    row("field names in upper case", |_, r| {
        r.headers.iter_mut().for_each(|(name, _)| *name = name.to_ascii_uppercase());
    }),
    row("strict: a folded field", |_, r| r.header("X-Folded", "a\r\n b")),
    row("a field without a value", |_, r| r.header("X-Empty", "")),
    row("a field outside of ASCII", |_, r| r.header("X-Odd", "grö\u{7f}")),
    row("90 fields", |_, r| (0..90).for_each(|n| r.header(&format!("X-{n}"), "v"))),
    row("strict: 300 fields", |_, r| (0..300).for_each(|n| r.header(&format!("X-{n}"), "v"))),
    row("a field of 32 KiB", |_, r| r.header("X-Long", "v".repeat(32 << 10))),
    row("strict: a field of 100 KiB", |_, r| r.header("X-Long", "v".repeat(100 << 10))),
    row("gzip without being asked", |q, r| {
        if q.kind == Kind::Manifest {
            gzip(r);
        }
    }),
    row("gzip of blobs", |q, r| {
        if q.kind == Kind::Blob && !q.is_head {
            gzip(r);
        }
    }),
    row("gzip of tokens", |q, r| {
        demand(q, r, "Bearer tok", &[BEARER]);
        if q.kind == Kind::Token {
            gzip(r);
        }
    }),
    row("encoding identity", |_, r| r.header("Content-Encoding", "identity")),
    row("encoding unknown", |q, r| {
        if q.kind == Kind::Manifest {
            r.header("Content-Encoding", "odd");
        }
    }),
    row("encoding empty", |_, r| r.header("Content-Encoding", "")),
    row("digest missing", |_, r| r.set("Docker-Content-Digest", None)),
    row("digest wrong", |q, r| {
        if q.kind == Kind::Manifest {
            r.set("Docker-Content-Digest", Some(&format!("sha256:{}", "0".repeat(64))));
        }
    }),
    row("digest wrong in blobs", |q, r| {
        if q.kind == Kind::Blob {
            r.set("Docker-Content-Digest", Some(&format!("sha256:{}", "0".repeat(64))));
        }
    }),
    row("digest nonsense", |q, r| {
        if q.kind == Kind::Manifest {
            r.set("Docker-Content-Digest", Some("nonsense"));
        }
    }),
    row("digest of another algorithm", |q, r| {
        if q.kind == Kind::Manifest {
            r.set("Docker-Content-Digest", Some(&format!("sha512:{}", "0".repeat(128))));
        }
    }),
    row("digest in HEAD only", |q, r| {
        if !q.is_head {
            r.set("Docker-Content-Digest", None);
        }
    }),
    row("type missing", |_, r| r.set("Content-Type", None)),
    row("type with parameters", |q, r| {
        manifest_type(q, r, "application/vnd.oci.image.manifest.v1+json; charset=utf-8")
    }),
    row("type in upper case", |q, r| manifest_type(q, r, "APPLICATION/VND.OCI.IMAGE.MANIFEST.V1+JSON")),
    row("type text/plain", |q, r| manifest_type(q, r, "text/plain")),
    row("type application/json", |q, r| manifest_type(q, r, "application/json")),
    row("type application/octet-stream", |q, r| manifest_type(q, r, "application/octet-stream")),
    row("type of docker", |q, r| manifest_type(q, r, "application/vnd.docker.distribution.manifest.v2+json")),
    row("type of an index", |q, r| manifest_type(q, r, "application/vnd.oci.image.index.v1+json")),
    row("type nonsense", |q, r| manifest_type(q, r, "///;;;")),
    row("type empty", |q, r| manifest_type(q, r, "")),
    row("blobs of type text/html", |q, r| {
        if q.kind == Kind::Blob {
            r.set("Content-Type", Some("text/html"));
        }
    }),
    // Broken content.
    slow(row("manifest that is not of its digest", |q, r| {
        if q.kind == Kind::Manifest && !q.is_head {
            r.body.push(b' ');
        }
    })),
    slow(row("damaged: blob changed", |q, r| {
        if q.kind == Kind::Blob && !r.body.is_empty() {
            // In the middle: a changed type of the file is another fault.
            let middle = r.body.len() / 2;
            r.body[middle] ^= 1;
        }
    })),
    row("damaged: manifest empty", |q, r| {
        if q.kind == Kind::Manifest {
            r.body.clear();
        }
    }),
    // Interrupted downloads.
    big("blob slow", |q, r| {
        if q.kind == Kind::Blob {
            r.pause = Duration::from_millis(20);
        }
    }),
    slow(big("blob cut once", |q, r| cut(q, r, |_| ()))),
    slow(big("blob cut once, ranges ignored", |q, r| cut(q, r, without_range))),
    slow(big("blob cut once, ranges 416", |q, r| {
        cut(q, r, |r| r.become_status("416 Range Not Satisfiable", ""))
    })),
    slow(big("blob cut once, ranges 400", |q, r| cut(q, r, |r| r.become_status("400 Bad Request", "")))),
    slow(big("blob cut once, ranges 403", |q, r| cut(q, r, |r| r.become_status("403 Forbidden", "")))),
    slow(big("blob cut once, 206 without Content-Range", |q, r| cut(q, r, |r| r.set("Content-Range", None)))),
    slow(big("blob cut once, 206 of another range", |q, r| {
        cut(q, r, |r| r.set("Content-Range", Some("bytes 0-5/300000")));
    })),
    slow(big("blob cut once, 206 with * as size", |q, r| {
        cut(q, r, |r| {
            let range = r.headers.iter_mut().find(|(name, _)| name == "Content-Range");
            if let Some((_, value)) = range {
                *value = format!("{}/*", value.split('/').next().unwrap_or_default());
            }
        });
    })),
    slow(big("blob cut once, chunked", |q, r| {
        cut(q, r, |_| ());
        r.framing = Framing::Chunked;
    })),
    slow(big("strict: blob cut always", |q, r| {
        if q.kind == Kind::Blob && r.body.len() > 1000 {
            r.cut = r.body.len() / 2;
        }
    })),
    slow(row("connection closed before the answer", |q, r| {
        if q.kind == Kind::Manifest && q.earlier == 0 {
            r.cut = 0;
            r.version = "";
        }
    })),
    // hosts.toml.
    hosts("mirror", "[host.\"http://OTHER\"]\n  capabilities = [\"pull\", \"resolve\"]\n", |_, _| ()),
    hosts("mirror with server", "server = \"http://HOME\"\n[host.\"http://OTHER\"]\n", |_, _| ()),
    hosts("mirror without capabilities", "[host.\"http://OTHER\"]\n", |_, _| ()),
    hosts("mirror that only pulls", "[host.\"http://OTHER\"]\n  capabilities = [\"pull\"]\n", |_, _| ()),
    hosts(
        "mirror that only resolves",
        "[host.\"http://OTHER\"]\n  capabilities = [\"resolve\"]\n",
        |_, _| (),
    ),
    hosts(
        "mirror of unknown capabilities",
        "[host.\"http://OTHER\"]\n  capabilities = [\"fly\"]\n",
        |_, _| (),
    ),
    hosts("mirror of no capabilities", "[host.\"http://OTHER\"]\n  capabilities = []\n", |_, _| ()),
    hosts("mirror that lacks it", "[host.\"http://OTHER\"]\n", |q, r| {
        if q.is_other {
            r.become_status("404 Not Found", "{}");
        }
    }),
    hosts("mirror that fails", "[host.\"http://OTHER\"]\n", |q, r| {
        if q.is_other {
            r.become_status("500 Internal Server Error", "{}");
        }
    }),
    hosts("mirror that forbids", "[host.\"http://OTHER\"]\n", |q, r| {
        if q.is_other {
            r.become_status("403 Forbidden", "{}");
        }
    }),
    hosts("mirror that asks for credentials", "[host.\"http://OTHER\"]\n", |q, r| {
        if q.is_other {
            demand(q, r, BASIC, &[r#"Basic realm="odd""#]);
        }
    }),
    hosts("mirror that lacks blobs", "[host.\"http://OTHER\"]\n", |q, r| {
        if q.is_other && q.kind == Kind::Blob {
            r.become_status("404 Not Found", "{}");
        }
    }),
    hosts("mirror with a path", "[host.\"http://OTHER/v2/prefix\"]\n  override_path = true\n", |q, r| {
        if q.is_other && !q.path().starts_with("/v2/prefix/odd/") {
            r.become_status("404 Not Found", "{}");
        }
    }),
    hosts("mirror with a path that is not overridden", "[host.\"http://OTHER/prefix\"]\n", |q, r| {
        if q.is_other && !q.path().starts_with("/prefix/v2/odd/") {
            r.become_status("404 Not Found", "{}");
        }
    }),
    hosts(
        "mirror with header",
        "[host.\"http://OTHER\"]\n[host.\"http://OTHER\".header]\n  x-odd = [\"a\", \"b\"]\n  x-one = \"c\"\n",
        |q, r| {
            if q.is_other && (q.head.get("x-odd") != Some("a") || q.head.get("x-one") != Some("c")) {
                r.become_status("403 Forbidden", "{}");
            } else if !q.is_other {
                r.become_status("404 Not Found", "{}");
            }
        },
    ),
    hosts("server at the other host", "server = \"http://OTHER\"\n", |q, r| {
        if !q.is_other {
            r.become_status("404 Not Found", "{}");
        }
    }),
    hosts("server with header", "server = \"http://HOME\"\n[header]\n  x-own = \"a\"\n", |q, r| {
        if !q.is_other && q.head.get("x-own") != Some("a") {
            r.become_status("403 Forbidden", "{}");
        }
    }),
    hosts("hosts.toml empty", "\n", |_, _| ()),
    hosts("hosts.toml not TOML", "= nonsense", |_, _| ()),
    hosts("hosts.toml with unknown keys", "nonsense = 1\n[host.\"http://OTHER\"]\n  odd = true\n", |_, _| ()),
    hosts("mirror with an unknown key", "[host.\"http://OTHER\"]\n  odd = true\n", |_, _| ()),
    hosts("mirror without scheme", "[host.\"OTHER\"]\n  capabilities = [\"pull\", \"resolve\"]\n", |_, _| ()),
    hosts("mirror of another type", "[host.\"http://OTHER\"]\n  capabilities = \"pull\"\n", |_, _| ()),
    hosts("mirror with skip_verify", "[host.\"http://OTHER\"]\n  skip_verify = true\n", |_, _| ()),
    hosts("mirror with a missing ca", "[host.\"http://OTHER\"]\n  ca = \"missing.crt\"\n", |_, _| ()),
    hosts("mirror by https that speaks http", "[host.\"https://OTHER\"]\n", |_, _| ()),
    // TLS.
    tls("TLS", VERIFIED, |_, _| ()),
    tls("TLS of an unknown authority", "server = \"https://TLSHOST\"\n", |_, _| ()),
    tls("TLS without hosts.toml on this machine", "", |_, _| ()),
    Row { home: "localhost:TLSPORT", ..row("TLS without hosts.toml on localhost", |_, _| ()) },
    tls(
        "TLS where hosts.toml has http and skip_verify",
        "server = \"http://TLSHOST\"\nskip_verify = true\n",
        |_, _| (),
    ),
    tls("TLS where hosts.toml has http and ca", "server = \"http://TLSHOST\"\nca = \"CAFILE\"\n", |_, _| ()),
    tls(
        "TLS where hosts.toml has http and another ca",
        "server = \"http://TLSHOST\"\nca = \"ANYCA\"\n",
        |_, _| (),
    ),
    tls(
        "TLS where hosts.toml has http and skip_verify = false",
        "server = \"http://TLSHOST\"\nskip_verify = false\n",
        |_, _| (),
    ),
    tls("TLS where hosts.toml has http and no ca", "server = \"http://TLSHOST\"\nca = []\n", |_, _| ()),
    tls(
        "TLS where hosts.toml has http and no client",
        "server = \"http://TLSHOST\"\nclient = []\n",
        |_, _| (),
    ),
    tls("TLS where hosts.toml has skip_verify = false alone", "skip_verify = false\n", |_, _| ()),
    tls("TLS where hosts.toml has http", "server = \"http://TLSHOST\"\n", |_, _| ()),
    hosts(
        "plain HTTP where hosts.toml has http and skip_verify",
        "server = \"http://HOME\"\nskip_verify = true\n",
        |_, _| (),
    ),
    hosts(
        "plain HTTP where hosts.toml has https and skip_verify",
        "server = \"https://HOME\"\nskip_verify = true\n",
        |_, _| (),
    ),
    hosts(
        "TLS of a mirror with http and skip_verify",
        "[host.\"http://TLSHOST\"]\n  skip_verify = true\n",
        |q, r| {
            if !q.is_tls {
                r.become_status("404 Not Found", "{}");
            }
        },
    ),
    Row {
        home: "ANYHOST",
        hosts: "server = \"https://ANYHOST\"\nca = \"ANYCA\"\n",
        ..row("TLS with a certificate for any purpose", |_, _| ())
    },
    tls("TLS, blobs redirected to http", VERIFIED, |q, r| {
        redirect(q, r, Kind::Blob, "307", "http://OTHERPATH")
    }),
    tls("TLS, manifests redirected to http", VERIFIED, |q, r| {
        redirect(q, r, Kind::Manifest, "307", "http://OTHERPATH")
    }),
    tls_login("TLS, blobs redirected to http, with credentials", |q, r| {
        demand(q, r, BASIC, &[r#"Basic realm="odd""#]);
        redirect(q, r, Kind::Blob, "307", "http://OTHERPATH");
    }),
    tls("TLS, token service with TLS", VERIFIED, |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer realm="https://TLSHOST/token""#]);
    }),
    tls("TLS, token service without TLS", VERIFIED, |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer realm="http://OTHER/token""#]);
    }),
    tls_login("TLS strict: password to a token service without TLS", |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer realm="http://OTHER/token""#]);
        token_needs(q, r, BASIC);
    }),
    tls("TLS strict: token service redirected to http", VERIFIED, |q, r| {
        demand(q, r, "Bearer tok", &[r#"Bearer realm="https://TLSHOST/token""#]);
        if q.kind == Kind::Token && q.is_tls {
            r.become_status("307", "");
            r.header("Location", fill(q, "http://OTHER/token2"));
        }
    }),
    hosts("blobs redirected to TLS", "server = \"http://HOME\"\nskip_verify = true\n", |q, r| {
        if q.kind == Kind::Blob && !q.is_tls {
            r.become_status("307", "");
            r.header("Location", fill(q, &format!("https://TLSHOST{}", q.path())));
        }
    }),
    row("TLS strict: blobs redirected to an unknown authority", |q, r| {
        if q.kind == Kind::Blob && !q.is_tls {
            r.become_status("307", "");
            r.header("Location", fill(q, &format!("https://TLSHOST{}", q.path())));
        }
    }),
    // Proxies; hosts of this machine are contacted directly.
    hosts("proxy for a mirror with http", "[host.\"http://get.invalid:5000\"]\n", of_other),
    hosts(
        "proxy with CONNECT only for a mirror with http",
        "[host.\"http://connect.invalid:5000\"]\n",
        of_other,
    ),
    hosts(
        "proxy for a mirror with http and skip_verify",
        "[host.\"http://get.invalid:5000\"]\n  skip_verify = true\n",
        of_other,
    ),
    hosts(
        "proxy for a mirror with https",
        "[host.\"https://connect.invalid:5000\"]\n  skip_verify = true\n",
        of_other,
    ),
    hosts("proxy without CONNECT for a mirror with https", "[host.\"https://get.invalid:5000\"]\n", of_other),
];

/// Lets only the other host, or the server with TLS, have the image.
fn of_other(request: &Request, reply: &mut Reply) {
    if !request.is_other {
        reply.become_status("404 Not Found", "{}");
    }
}

/// A text with the addresses of both hosts.
fn fill(request: &Request, text: &str) -> String {
    text.replace("HOME", &request.home.to_string())
        .replace("OTHER", &request.other.to_string())
        .replace("TLSHOST", &request.tls)
}

/// Requires this value of `Authorization`, or answers 401 with these challenges; not of who was redirected here.
fn demand(request: &Request, reply: &mut Reply, wanted: &str, challenges: &[&str]) {
    if !request.is_other || request.is_of_mirror() {
        ask(request, reply, wanted, challenges);
    }
}

/// Demands the credentials at both hosts.
fn ask(request: &Request, reply: &mut Reply, wanted: &str, challenges: &[&str]) {
    if request.kind != Kind::Token && request.authorization() != wanted {
        reply.become_status("401 Unauthorized", r#"{"errors":[{"code":"UNAUTHORIZED"}]}"#);
        for challenge in challenges {
            reply.header("WWW-Authenticate", fill(request, challenge));
        }
    }
}

/// Lets the token service require credentials, in the field or in a form.
fn token_needs(request: &Request, reply: &mut Reply, wanted: &str) {
    let has_form = request.form.contains(&format!("username={USER}")) && request.form.contains(PASSWORD);
    let fits = request.authorization() == wanted || has_form && wanted == BASIC;
    if request.kind == Kind::Token && !fits {
        reply.become_status("401 Unauthorized", "{}");
    }
}

/// Requires a token, and answers this for it.
fn token(request: &Request, reply: &mut Reply, body: &str) {
    demand(request, reply, "Bearer tok", &[BEARER]);
    if request.kind == Kind::Token {
        reply.body = body.as_bytes().to_vec();
    }
}

fn token_status(request: &Request, reply: &mut Reply, status: &str) {
    demand(request, reply, "Bearer tok", &[BEARER]);
    if request.kind == Kind::Token {
        reply.status = status.into();
        if status.starts_with("204") {
            reply.body.clear();
        }
    }
}

fn redirect_token(request: &Request, reply: &mut Reply, status: &str, place: &str) {
    demand(request, reply, "Bearer tok", &[BEARER]);
    if request.kind == Kind::Token && !request.path().starts_with("/token2") {
        reply.become_status(status, "");
        reply.header("Location", fill(request, place));
    }
}

/// Answers the first requests of a kind with an error.
fn fail(request: &Request, reply: &mut Reply, kind: Kind, times: usize, status: &str) {
    if request.kind == kind && request.earlier < times {
        reply.become_status(status, "{}");
        if times != usize::MAX {
            reply.header("Retry-After", "1");
        }
    }
}

fn head(request: &Request, reply: &mut Reply, status: &str) {
    if request.is_head {
        reply.become_status(status, "");
    }
}

/// Redirects requests of a kind to the same path of the other host.
fn redirect(request: &Request, reply: &mut Reply, kind: Kind, status: &str, place: &str) {
    if request.kind == kind && !request.is_other {
        let path = request.path().to_owned();
        reply.become_status(status, "");
        reply.header("Location", place.replace("OTHERPATH", &format!("{}{path}", request.other)));
    }
}

/// Redirects blobs to a path that ends with their digest.
fn local(request: &Request, reply: &mut Reply, place: &str) {
    let path = request.path().to_owned();
    if request.kind == Kind::Blob && path.contains("/blobs/") {
        let name = path.rsplit('/').next().unwrap_or_default();
        reply.become_status("307 Temporary Redirect", "");
        reply.header("Location", fill(request, place).replace("NAME", name));
    }
}

/// Redirects blobs this many times.
fn chain(request: &Request, reply: &mut Reply, count: usize) {
    if request.kind != Kind::Blob {
        return;
    }
    let path = request.path().split('?').next().unwrap_or_default().to_owned();
    let step: usize = request.path().split("step=").nth(1).and_then(|step| step.parse().ok()).unwrap_or(0);
    if step < count {
        reply.become_status("302 Found", "");
        reply.header("Location", format!("{path}?step={}", step + 1));
    }
}

fn wrong_length(request: &Request, reply: &mut Reply, kind: Kind, more: i64) {
    if request.kind == kind && !request.is_head {
        reply.framing = Framing::WrongLength(more);
    }
}

fn manifest_type(request: &Request, reply: &mut Reply, value: &str) {
    if request.kind == Kind::Manifest {
        reply.set("Content-Type", Some(value));
    }
}

/// Compresses the body, and sets Content-Encoding.
fn gzip(reply: &mut Reply) {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(&reply.body).expect("memory takes it");
    reply.body = encoder.finish().expect("memory takes it");
    reply.set("Content-Encoding", Some("gzip"));
}

/// Ends the first answer with the large blob in its middle, and changes those to requests with a range.
fn cut(request: &Request, reply: &mut Reply, change: fn(&mut Reply)) {
    if request.kind != Kind::Blob || request.is_head {
        return;
    }
    if request.head.get("range").is_some_and(|range| !range.starts_with("bytes=0-")) {
        change(reply);
    } else if reply.body.len() > 1000 && request.earlier < 2 {
        reply.cut = reply.body.len() / 2;
    }
}

/// The answer to the request without its range.
fn without_range(reply: &mut Reply) {
    reply.status = "200 OK".into();
    reply.body = reply.whole.clone();
    reply.set("Content-Range", None);
}
