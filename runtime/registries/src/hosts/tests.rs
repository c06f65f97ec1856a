//! Tests files from containerd's documentation, and invalid files.

use std::path::Path;

use super::*;

fn read(text: &str, registry: &str) -> (Vec<HostEntry>, Vec<String>) {
    whole("f", Path::new("/certs"), text, registry).unwrap_or_else(|problem| panic!("{problem:?}"))
}

#[test]
fn hosts_are_tried_in_the_order_of_the_file_with_the_server_last() {
    let text = r#"
server = "https://registry-1.docker.io"

[host."https://zmirror.example/prefix"]
  capabilities = ["pull"]
  ca = "ca.pem"
  client = [["client.cert", "/elsewhere/client.key"]]
  [host."https://zmirror.example/prefix".header]
    x-custom = ["a", "b"]
    authorization = "Basic c2VjcmV0"

[host."http://amirror.example:5000/v2/proxy"]
  capabilities = ["pull", "resolve"]
  override_path = true
  skip_verify = true
  ca = ["one.pem", "/two.pem"]
  client = "both.pem"
  dial_timeout = "1s"
"#;
    let (entries, problems) = read(text, "docker.io");
    assert_eq!(problems, Vec::<String>::new());
    let [first, second, server] = entries.as_slice() else { panic!("{entries:#?}") };
    assert_eq!(
        (first.url.as_str(), first.can_resolve, first.can_pull),
        ("https://zmirror.example/prefix/v2", false, true)
    );
    assert_eq!(first.tls.ca_files, [Path::new("/certs/ca.pem")]);
    assert_eq!(first.tls.client, Some(("/certs/client.cert".into(), "/elsewhere/client.key".into())));
    let headers: Vec<_> = first.headers.iter().map(|(name, value)| format!("{name}={value}")).collect();
    assert_eq!(headers.len(), 3, "{headers:?}");
    assert!(headers.contains(&"x-custom=b".to_owned()));
    assert_eq!(
        (second.url.as_str(), second.can_resolve, second.source.as_str()),
        ("http://amirror.example:5000/v2/proxy", true, "f:12")
    );
    assert!(second.tls.insecure_skip_verify && second.tls.ca_files.len() == 2);
    assert_eq!(second.tls.client, Some(("/certs/both.pem".into(), "/certs/both.pem".into())));
    let expected = HostEntry::plain("https://registry-1.docker.io/v2".into(), "f:2".into());
    assert_eq!(*server, HostEntry { is_server: true, ..expected });
}

/// With containerd, too, TLS is tried first for these settings with the values of their defaults, but not for an empty `client`.
#[test]
fn named_settings_of_tls_count_with_any_value() {
    let text = "[host.'http://b']\nskip_verify = false\n[host.'http://c']\nclient = []\n[host.'http://d']\nca = []\n[host.'http://e']\n";
    let (entries, problems) = read(text, "a");
    assert_eq!(problems, Vec::<String>::new());
    let named: Vec<bool> = entries.iter().map(|entry| entry.has_tls_keys).collect();
    assert_eq!(named[..4], [true, false, true, false]);
}

/// Regression: a file with an array of tables was refused, and its mirrors were not used.
#[test]
fn arrays_of_tables_are_hosts_in_the_order_of_the_file() {
    let text = r#"
[[host]]
[host."https://z.example"]
  ca = "z.pem"
[[host]]
  "https://b.example" = { skip_verify = true }
  "https://a.example" = {}
"#;
    let (entries, problems) = read(text, "docker.io");
    assert_eq!(problems, Vec::<String>::new());
    let urls: Vec<_> = entries.iter().map(|entry| (entry.url.as_str(), entry.source.as_str())).collect();
    let expected =
        [("https://z.example/v2", "f:3"), ("https://b.example/v2", "f:6"), ("https://a.example/v2", "f:7")];
    assert_eq!(urls[..3], expected);
    assert!(entries[1].tls.insecure_skip_verify && entries[0].tls.ca_files.len() == 1);
    let (entries, problems) =
        read("[[host.\"https://one\"]]\nca = 'a'\n[[host.\"https://one\"]]\n[[mirror]]\n", "docker.io");
    assert_eq!((entries.len(), problems.len()), (3, 1), "{problems:?}");
    assert!(
        problems[0].starts_with("f:4: ") && problems[0].contains("\"mirror\" is unknown"),
        "{problems:?}"
    );
}

#[test]
fn settings_at_the_top_apply_to_the_server() {
    let (entries, problems) = read("ca = \"ca.pem\"\n[host]\n", "reg.example:5000");
    assert_eq!(problems, Vec::<String>::new());
    assert_eq!(entries.len(), 1);
    assert_eq!(entries[0].url, "https://reg.example:5000/v2");
    assert_eq!(entries[0].tls.ca_files, [Path::new("/certs/ca.pem")]);
}

#[test]
fn an_invalid_entry_affects_only_itself() {
    let text = "\
server = \"ftp://no\"
[host.\"ftp://no\"]
[host.\"https://one\"]
  skip_verify = \"perhaps\"
[host.\"https://two\"]
  capabilites = [\"pull\"]
[host.\"https://three\"]
  client = [[\"a\", \"b\", \"c\"]]
";
    let (entries, problems) = read(text, "docker.io");
    let urls: Vec<&str> = entries.iter().map(|entry| entry.url.as_str()).collect();
    assert_eq!(urls[0], "https://two/v2", "{problems:#?}");
    assert_eq!(urls.len(), 2, "{urls:?}");
    for line in ["f:1:", "f:2:", "f:4:", "f:6:", "f:8:"] {
        assert!(problems.iter().any(|problem| problem.starts_with(line)), "{line}: {problems:#?}");
    }
    let broken = whole("f", Path::new("/certs"), "\nserver = \n", "docker.io").unwrap_err();
    assert_eq!(broken.line, 2);
}

#[test]
fn directory_names_may_replace_the_colon_of_the_port() {
    assert_eq!(in_file_name("reg.example:5000"), "reg.example_5000_");
    assert_eq!(in_file_name("docker.io"), "docker.io");
    assert_eq!(in_file_name("[fd00::1]"), "[fd00::1]");
}

/// Regression: the copy outlived the directory of its registry, so that an invalid file in a new one asked the mirrors of long ago.
#[test]
fn the_copy_of_a_file_is_removed_with_the_directory_of_its_registry() {
    let root = std::env::temp_dir().join(format!("coracle-hosts-copies-{}", std::process::id()));
    let (folder, copies) = (root.join("certs.d"), root.join("copies"));
    let own = folder.join("example.org");
    let write = |text: &str| {
        std::fs::create_dir_all(&own).unwrap();
        std::fs::write(own.join("hosts.toml"), text).unwrap();
    };
    std::fs::create_dir_all(&copies).unwrap();
    let load = || load(&folder, "example.org", &copies);
    let first = |hosts: Option<Hosts>| hosts.map(|hosts| hosts.entries[0].url.clone());
    write("[host.\"https://mirror.example\"]\n");
    assert_eq!(first(load().0).as_deref(), Some("https://mirror.example/v2"));
    write("invalid");
    assert_eq!(first(load().0).as_deref(), Some("https://mirror.example/v2"), "a typing error");
    std::fs::remove_dir_all(&own).unwrap();
    assert_eq!(first(load().0), None);
    write("invalid");
    let (hosts, problems) = load();
    assert!(hosts.is_none() && problems.is_broken, "{problems:?}");
    std::fs::remove_dir_all(&root).unwrap();
}
