//! Signatures of the .rpm and the .apk with keys that these tests create: rpm itself verifies the former; the latter is
//! verified by its format with openssl, since Debian 12 has no apk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::apk::{Segment, segments};
use crate::dist::stand_ins;
use crate::{EPOCH, Folder, only, package, run, said, triple, workspace};

/// Builds a package of this format and signs it with the key; returns the output of `packaging/dist`.
fn dist(folder: &Folder, out: &Path, format: &str, key: (&str, &Path)) -> Output {
    run(Command::new(workspace().join("packaging/dist"))
        .args([out, Path::new(&triple())])
        .env("CORACLE_FORMATS", format)
        .env("CORACLE_PROGRAMS", stand_ins(folder, "programs", 0o755))
        .env("SOURCE_DATE_EPOCH", EPOCH.to_string())
        .env(key.0, key.1))
}

/// Builds a signed package; returns the directory of the release, which also has the public key.
#[track_caller]
fn signed(folder: &Folder, name: &str, format: &str, key: (&str, &Path)) -> PathBuf {
    let out = folder.path().join(name);
    let output = dist(folder, &out, format, key);
    assert!(output.status.success(), "{}", said(&output));
    out
}

/// A copy of a package in which one bit in the middle is different.
fn damaged(package: &Path) -> PathBuf {
    let mut bytes = fs::read(package).expect("a package");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    let copy = package.with_file_name("damaged");
    fs::write(&copy, bytes).expect("a file");
    copy
}

/// Creates a key as the packaging page says; returns the file with the secret key.
pub(crate) fn rpm_key(folder: &Folder, name: &str) -> PathBuf {
    let home = folder.path().join(format!("{name}.gpg"));
    let key = folder.path().join(format!("{name}.asc"));
    let script = r#"set -eu
mkdir -m 0700 "$1"
gpg --homedir "$1" --batch --quiet --passphrase "" --quick-generate-key "test of coracle <test@coracle.invalid>" rsa3072 sign never
gpg --homedir "$1" --batch --armor --export-secret-keys >"$2"
gpgconf --homedir "$1" --kill gpg-agent"#;
    let output = run(Command::new("bash").args(["-c", script, "bash"]).args([&home, &key]));
    assert!(output.status.success(), "{}", said(&output));
    key
}

/// Gives a package to rpm, which must verify signatures: for a check, and for an installation that stops before it changes
/// anything.
fn rpm(database: &Path, package: &Path) -> [Output; 2] {
    let ask = |program: &str, words: &[&str]| {
        let mut command = Command::new(program);
        command.arg("--dbpath").arg(database).args(["--define", "_pkgverify_level all"]);
        run(command.args(words).arg(package))
    };
    [ask("rpmkeys", &["--checksig"]), ask("rpm", &["--install", "--test", "--nodeps"])]
}

#[test]
fn rpm_takes_a_signed_package_and_refuses_an_unsigned_damaged_or_foreign_one() {
    let folder = Folder::new("rpm-signature");
    let [key, other] = ["key", "other"].map(|name| rpm_key(&folder, name));
    let out = signed(&folder, "signed", "rpm", ("CORACLE_RPM_KEY", &key));
    let public = out.join("coracle-rpm.asc");
    assert!(!fs::read_to_string(&public).expect("the public key").contains("PRIVATE"));
    let sums = fs::read_to_string(out.join("SHA256SUMS")).expect("the sums");
    assert!(sums.contains("  coracle-rpm.asc\n"), "{sums}");

    let database = folder.path().join("database");
    let imported = run(Command::new("rpmkeys").arg("--dbpath").arg(&database).arg("--import").arg(public));
    assert!(imported.status.success(), "{}", said(&imported));
    let ours = only(&out, "rpm");
    for output in rpm(&database, &ours) {
        assert!(output.status.success(), "{}", said(&output));
    }
    let foreign = only(&signed(&folder, "foreign", "rpm", ("CORACLE_RPM_KEY", &other)), "rpm");
    let unsigned = package(&folder, "rpm", &folder.path().join("programs"));
    for refused in [&unsigned, &damaged(&ours), &foreign] {
        for output in rpm(&database, refused) {
            assert!(!output.status.success(), "{}: {}", refused.display(), said(&output));
        }
    }
}

pub(crate) fn apk_key(folder: &Folder, name: &str) -> PathBuf {
    let key = folder.path().join(name);
    let mut openssl = Command::new("openssl");
    openssl.args(["genpkey", "-quiet", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:3072", "-out"]);
    let output = run(openssl.arg(&key));
    assert!(output.status.success(), "{}", said(&output));
    key
}

/// Verifies a package as apk does: the first segment has the signature of the compressed control segment, in a file with
/// the name of the public key, and the control segment has the digest of the data.
fn verify_apk(folder: &Folder, package: &Path, public: &Path) -> Result<(), String> {
    let all = segments(package)?;
    let [signature, control, data] = &all[..] else { return Err(format!("{} segments", all.len())) };
    let name = public.file_name().expect("a file").to_string_lossy().into_owned();
    let signature = content(signature, &format!(".SIGN.RSA.{name}"))?;
    let [of_control, place] = ["control", "signature"].map(|name| folder.path().join(name));
    fs::write(&of_control, &control.packed).expect("a file");
    fs::write(&place, signature).expect("a file");
    let mut openssl = Command::new("openssl");
    openssl.args(["dgst", "-sha1", "-verify"]).arg(public).arg("-signature").arg(&place).arg(&of_control);
    let verified = run(&mut openssl);
    if !verified.status.success() {
        return Err(said(&verified));
    }
    let info = String::from_utf8(content(control, ".PKGINFO")?).map_err(|error| error.to_string())?;
    let digest = data.digest();
    info.contains(&format!("\ndatahash = {digest}\n")).then_some(()).ok_or(format!("{digest}: {info}"))
}

/// The content of a file in a segment.
fn content(segment: &Segment, name: &str) -> Result<Vec<u8>, String> {
    let mut archive = tar::Archive::new(&segment.archive[..]);
    for entry in archive.entries().map_err(|error| error.to_string())? {
        let mut entry = entry.map_err(|error| error.to_string())?;
        if entry.path().is_ok_and(|path| path == Path::new(name)) {
            let mut content = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut content).map_err(|error| error.to_string())?;
            return Ok(content);
        }
    }
    Err(format!("no {name}"))
}

#[test]
fn an_apk_is_signed_with_the_key_and_a_change_is_noticed() {
    let folder = Folder::new("apk-signature");
    let [key, other] = ["key.pem", "other.pem"].map(|name| apk_key(&folder, name));
    let out = signed(&folder, "signed", "apk", ("CORACLE_APK_KEY", &key));
    let public = out.join("coracle-apk.rsa.pub");
    assert!(!fs::read_to_string(&public).expect("the public key").contains("PRIVATE"));
    let ours = only(&out, "apk");
    assert_eq!(verify_apk(&folder, &ours, &public), Ok(()));

    let foreign = only(&signed(&folder, "foreign", "apk", ("CORACLE_APK_KEY", &other)), "apk");
    let unsigned = package(&folder, "apk", &folder.path().join("programs"));
    for refused in [&unsigned, &damaged(&ours), &foreign] {
        let verified = verify_apk(&folder, refused, &public);
        assert!(verified.is_err(), "{} passed", refused.display());
    }
    // The same key gives the same bytes: RSA's signature has no time and nothing random.
    let again = only(&signed(&folder, "again", "apk", ("CORACLE_APK_KEY", &key)), "apk");
    assert!(fs::read(again).expect("a package") == fs::read(ours).expect("a package"));
}

/// Checks that a wrong path in CI cannot release packages without signatures.
#[test]
fn a_missing_or_useless_key_gives_no_package() {
    let folder = Folder::new("no-key");
    let useless = folder.write("useless", "no key\n");
    for (format, variable) in [("rpm", "CORACLE_RPM_KEY"), ("apk", "CORACLE_APK_KEY")] {
        for key in [&folder.path().join("missing"), &useless] {
            let out = folder.path().join("out");
            let output = dist(&folder, &out, format, (variable, key));
            assert!(!output.status.success(), "{format} with {}", key.display());
            let files: Vec<_> = fs::read_dir(&out).expect("a release").flatten().collect();
            assert!(files.is_empty(), "{files:?}");
        }
    }
}
