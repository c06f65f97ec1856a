//! The hand-made cases.

use std::time::Duration;

use coracle_tests::image::{INDEX, MANIFEST, descriptor};
use serde_json::{Value, json};

use super::{Case, REPOSITORY};
use crate::archive::{Archive, Member};
use crate::server::Server;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = vec![Case::new("usual")];
    cases.extend(members());
    cases.extend(documents());
    cases.extend(users());
    cases.extend(files());
    cases.extend(manifests());
    cases.extend(indexes());
    cases
}

/// Values of each member of `config`.
fn members() -> Vec<Case> {
    let odd = |key: &'static str| {
        let values = [
            ("null", json!(null)),
            ("a number", json!(5)),
            ("a text", json!("text")),
            ("an empty text", json!("")),
            ("an empty list", json!([])),
            ("an empty map", json!({})),
            ("a list with an empty text", json!([""])),
            ("a list with null", json!([null])),
            ("a list with a number", json!([5])),
            ("a map with null", json!({ "a": null })),
        ];
        // A runtime does nothing with ports.
        let word = if key == "ExposedPorts" { "not used, " } else { "" };
        values.map(|(name, value)| Case::new(format!("{word}{key} is {name}")).with(key, value))
    };
    const KEYS: [&str; 9] =
        ["Entrypoint", "Cmd", "Env", "User", "WorkingDir", "StopSignal", "Labels", "Volumes", "ExposedPorts"];
    let mut cases: Vec<Case> = KEYS.into_iter().flat_map(odd).collect();
    let with = |name: &str, key: &str, value: Value| Case::new(name).with(key, value);
    cases.extend([
        with("Cmd missing", "Cmd", json!(null)).with("Cmd", json!([])),
        with("Entrypoint and Cmd empty", "Entrypoint", json!([])).with("Cmd", json!([])),
        with("Entrypoint with an empty text and Cmd", "Entrypoint", json!([""]))
            .with("Cmd", json!(["/probe"])),
        with("Entrypoint with an empty text before another", "Entrypoint", json!(["", "/probe"])),
        with("Entrypoint that is missing", "Entrypoint", json!(["/no/such/program"])),
        with("Entrypoint that is no program", "Entrypoint", json!(["/etc/passwd"])),
        with("Entrypoint that is a directory", "Entrypoint", json!(["/etc"])),
        with("Entrypoint without a path", "Entrypoint", json!(["probe"])).with("Env", json!(["PATH=/"])),
        with("Entrypoint without a path or PATH", "Entrypoint", json!(["probe"])).with("Env", json!([])),
        with("Entrypoint relative to the directory", "Entrypoint", json!(["./probe"])),
        with("Env without =", "Env", json!(["WORD", "A=1"])),
        with("Env with an empty name", "Env", json!(["=x", "A=1"])),
        with("Env twice", "Env", json!(["A=1", "A=2", "PATH=/bin"])),
        with("Env with an empty value", "Env", json!(["A=", "PATH="])),
        with("Env with =", "Env", json!(["A=b=c"])),
        with("Env with a line break", "Env", json!(["A=b\nc"])),
        with("Env with HOME", "Env", json!(["HOME=/elsewhere"])),
        with("Env with a NUL", "Env", json!(["A=b\0c"])),
        with("Env with spaces", "Env", json!([" A = b "])),
        with("WorkingDir that is missing", "WorkingDir", json!("/made/now")),
        with("WorkingDir relative", "WorkingDir", json!("etc")),
        with("WorkingDir with ..", "WorkingDir", json!("/etc/../home")),
        with("WorkingDir that is a file", "WorkingDir", json!("/etc/passwd")),
        with("StopSignal by name", "StopSignal", json!("SIGUSR1")),
        with("StopSignal by short name", "StopSignal", json!("USR1")),
        with("StopSignal in lower case", "StopSignal", json!("sigusr1")),
        with("StopSignal by number", "StopSignal", json!("10")),
        with("StopSignal of real time", "StopSignal", json!("SIGRTMIN+3")),
        with("StopSignal unknown", "StopSignal", json!("SIGNOTHING")),
        with("StopSignal 0", "StopSignal", json!("0")),
        with("StopSignal 65", "StopSignal", json!("65")),
        with("Volumes", "Volumes", json!({ "/data": {}, "relative": {}, "/etc": {} })),
        with("ExposedPorts", "ExposedPorts", json!({ "80/tcp": {}, "odd": {} })),
        with("members in lower case", "user", json!("1000")).with("workingdir", json!("/etc")),
        with("unknown members", "OnBuild", json!(["x"])).with("Healthcheck", json!({ "Test": ["NONE"] })),
        with("Shell and ArgsEscaped", "Shell", json!(["/bin/sh"])).with("ArgsEscaped", json!(true)),
    ]);
    cases
}

fn document(name: &str, change: impl Fn(&mut Value) + 'static) -> Case {
    Case { change_config: Box::new(change), ..Case::new(name) }
}

/// The configuration's document around `config`.
fn documents() -> Vec<Case> {
    let set = |name: &str, key: &'static str, value: Value| {
        document(name, move |document| document[key] = value.clone())
    };
    let mut cases = vec![
        set("config is null", "config", json!(null)),
        set("config is a text", "config", json!("x")),
        set("config is a list", "config", json!([])),
        set("created is null", "created", json!(null)),
        set("not used, created is no time", "created", json!("yesterday")),
        set("not used, created is empty", "created", json!("")),
        set("not used, created is a number", "created", json!(5)),
        set("history is null", "history", json!(null)),
        set("history is longer", "history", json!([{}, {}, {}, { "empty_layer": true }])),
        set("not used, history is a text", "history", json!("x")),
        set("os is missing", "os", json!(null)),
        set("os is empty", "os", json!("")),
        set("os is Linux", "os", json!("Linux")),
        set("os is windows", "os", json!("windows")),
        set("os is a number", "os", json!(5)),
        set("variant is v3", "variant", json!("v3")),
        set("os.version", "os.version", json!("10")),
        set("not used, author is a number", "author", json!(5)),
        set("rootfs is null", "rootfs", json!(null)),
        set("rootfs without a type", "rootfs", json!({})),
        document("rootfs of another type", |document| document["rootfs"]["type"] = json!("base")),
        document("no diff ID", |document| document["rootfs"]["diff_ids"] = json!([])),
        document("diff IDs null", |document| document["rootfs"]["diff_ids"] = json!(null)),
        document("one diff ID too many", |document| {
            let zero = format!("sha256:{}", "0".repeat(64));
            document["rootfs"]["diff_ids"].as_array_mut().expect("a list").push(json!(zero));
        }),
        document("wrong diff ID", |document| {
            document["rootfs"]["diff_ids"][0] = json!(format!("sha256:{}", "0".repeat(64)));
        }),
        document("diff ID that is none", |document| document["rootfs"]["diff_ids"][0] = json!("x")),
        document("document is a list", |document| *document = json!([])),
        document("document is empty", |document| *document = json!({})),
    ];
    const ARCHITECTURES: [&str; 14] = [
        "", "x86_64", "x86-64", "AMD64", "aarch64", "arm64", "386", "i386", "i686", "armhf", "unknown",
        "wasm", "all", "amd64p32",
    ];
    cases.extend(ARCHITECTURES.map(|word| set(&format!("architecture {word}"), "architecture", json!(word))));
    cases
}

/// Users of an image with the usual files.
fn users() -> Vec<Case> {
    const USERS: [&str; 40] = [
        "root",
        "alice",
        "alice:crew",
        "alice:2000",
        "alice:",
        ":crew",
        ":",
        "1000",
        "1000:1000",
        "1000:crew",
        "1001",
        "4242",
        "4242:4242",
        "4242:crew",
        "0",
        "0:0",
        "nobody",
        "nobody:nobody",
        "alice:nobody",
        "-1",
        "-1:0",
        "+5",
        "007",
        "1000:-1",
        "4294967294",
        "4294967295",
        "4294967296",
        "2147483647",
        "2147483648",
        "99999999999999999999",
        " alice",
        "alice ",
        "alice:crew:boat",
        "1000:1000:1000",
        "0x10",
        "1e3",
        "ALICE",
        "größe",
        "#1000",
        "alice\n",
    ];
    USERS.map(|user| Case::new(format!("User {user:?}")).with("User", json!(user))).into()
}

/// Files of users and groups.
fn files() -> Vec<Case> {
    let with = |name: &str, members: Vec<Member>, user: &str| Case {
        layers: vec![Archive::of(members)],
        ..Case::new(format!("users' files, {name}")).with("User", json!(user))
    };
    let passwd = |text: &str| Member::file("etc/passwd", text);
    let group = |text: &str| Member::file("etc/group", text);
    let gone = |file: &str| Member::file(&format!("etc/.wh.{file}"), "");
    let long = format!("long:x:5:5:{}:/:/bin/sh\nalice:x:1000:1000::/home/alice:/x\n", "c".repeat(100_000));
    vec![
        with("none by name", vec![gone("passwd"), gone("group")], "alice"),
        with("none by number", vec![gone("passwd"), gone("group")], "1000"),
        with("none, root", vec![gone("passwd"), gone("group")], "root"),
        with("none, both numbers", vec![gone("passwd"), gone("group")], "1000:2000"),
        with("no groups", vec![gone("group")], "alice"),
        with("no groups, group by name", vec![gone("group")], "alice:crew"),
        with("no users, group by name", vec![gone("passwd")], "1000:crew"),
        with("empty", vec![passwd(""), group("")], "alice"),
        with("empty by number", vec![passwd(""), group("")], "1000"),
        with("no line break at the end", vec![passwd("alice:x:1005:1006::/:/x")], "alice"),
        with(
            "comments",
            vec![passwd("# a comment\n\n#alice:x:1:1::/:/x\nalice:x:1005:1006::/:/x\n")],
            "alice",
        ),
        with("CRLF", vec![passwd("alice:x:1005:1006::/home/alice:/x\r\n")], "alice"),
        with("spaces", vec![passwd("  alice : x : 1005 : 1006 :: / : /x\n")], "alice"),
        with("short lines", vec![passwd("alice:x:1005:1006\nbob:x:1007\ncarol\n")], "alice"),
        with("bad line, a line without a group", vec![passwd("alice:x:1005\n")], "alice"),
        with("bad line, a line with a name alone", vec![passwd("alice\n")], "alice"),
        with("bad line, number that is none", vec![passwd("alice:x:one:two::/:/x\n")], "alice"),
        with("bad line, number that is empty", vec![passwd("alice:x:::::\n")], "alice"),
        with("bad line, negative number", vec![passwd("alice:x:-5:-6::/:/x\n")], "alice"),
        with("bad line, big number", vec![passwd("alice:x:4294967295:1::/:/x\n")], "alice"),
        with("bad line, bigger number", vec![passwd("alice:x:4294967296:1::/:/x\n")], "alice"),
        with("twice", vec![passwd("alice:x:5:6::/:/x\nalice:x:7:8::/:/x\n")], "alice"),
        with("name that is a number", vec![passwd("1000:x:5:6::/evil:/x\n")], "1000"),
        with("group name that is a number", vec![group("1000:x:5:\n")], "1000:1000"),
        with("number of two lines", vec![passwd("a:x:5:6::/a:/x\nb:x:5:7::/b:/x\n")], "5"),
        with("NIS", vec![passwd("+::::::\n-alice\nalice:x:5:6::/:/x\n")], "alice"),
        with("home", vec![passwd("alice:x:5:6::/home/of/alice:/x\n")], "alice"),
        with("home empty", vec![passwd("alice:x:5:6:::/x\n")], "alice"),
        with("long line", vec![passwd(&long)], "alice"),
        with(
            "many groups",
            vec![group(&(0..300).map(|n| format!("g{n}:x:{n}:alice\n")).collect::<String>())],
            "alice",
        ),
        with(
            "members with spaces",
            vec![group("a:x:50: alice , bob\nb:x:51:alice,\nc:x:52:,alice\n")],
            "alice",
        ),
        with("group line short", vec![group("a:x:50\nb:x\nc\nd:x:53:alice\n")], "alice"),
        with("bad line, group number that is none", vec![group("a:x:one:alice\nb:x:51:alice\n")], "alice"),
        with("group twice", vec![group("a:x:50:alice\na:x:51:alice\nb:x:50:alice\n")], "alice:a"),
        with(
            "symlink",
            vec![Member::file("etc/real", "alice:x:5:6::/:/x\n"), Member::symlink("etc/passwd", "real")],
            "alice",
        ),
        with(
            "absolute symlink",
            vec![Member::file("real", "alice:x:5:6::/:/x\n"), Member::symlink("etc/passwd", "/real")],
            "alice",
        ),
        with("dangling symlink", vec![Member::symlink("etc/passwd", "no")], "alice"),
        with("dangling symlink by number", vec![Member::symlink("etc/passwd", "no")], "1000"),
        with("symlink to itself", vec![Member::symlink("etc/passwd", "passwd")], "1000"),
        with("symlink out", vec![Member::symlink("etc/passwd", "../../../../../etc/passwd")], "alice"),
        with("directory", vec![Member::directory("etc/passwd")], "1000"),
        // containerd waits for a writer, or reads, without end.
        Case {
            limit: Some(Duration::from_secs(5)),
            ..with("FIFO", vec![Member::new(b'6', "etc/passwd")], "1000")
        },
        Case {
            limit: Some(Duration::from_secs(5)),
            ..with("device", vec![Member::device(b'3', "etc/passwd", 1, 5)], "1000")
        },
        with(
            "/etc is a symlink",
            vec![
                Member::directory("other"),
                Member::file("other/passwd", "alice:x:5:6::/:/x\n"),
                Member::symlink("etc", "/other"),
            ],
            "alice",
        ),
        with("mode 0", vec![passwd("alice:x:5:6::/:/x\n").mode(0)], "alice"),
        with(
            "bytes that are no UTF-8",
            vec![Member::new(b'0', "etc/passwd").with(b"\xff\xfe:x:1:1::/:/x\nalice:x:5:6:\xff:/:/x\n")],
            "alice",
        ),
        with(
            "NUL",
            vec![Member::new(b'0', "etc/passwd").with(b"a\0b:x:1:1::/:/x\nalice:x:5:6::/:/x\n")],
            "alice",
        ),
        with("root of another number", vec![passwd("root:x:5:6::/:/x\n")], "root"),
        with("empty user, root of another number", vec![passwd("root:x:5:6::/:/x\n")], ""),
        with("groups of root", vec![group("a:x:50:root\n")], ""),
        with("groups of user 0", vec![group("a:x:50:root\n")], "0"),
    ]
}

fn manifest(name: &str, change: impl Fn(&mut Value) + 'static) -> Case {
    Case { change_manifest: Box::new(change), ..Case::new(format!("manifest, {name}")) }
}

fn manifests() -> Vec<Case> {
    const DOCKER: &str = "application/vnd.docker.distribution.manifest.v2+json";
    let set = |name: &str, pointer: &'static str, value: Value| {
        manifest(name, move |manifest| {
            let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
            let parent = manifest.pointer_mut(parent).expect("a parent");
            match key.parse::<usize>() {
                Ok(index) => parent[index] = value.clone(),
                Err(_) => parent[key] = value.clone(),
            }
        })
    };
    let zero = format!("sha256:{}", "0".repeat(64));
    let empty = json!({
        "mediaType": "application/vnd.oci.empty.v1+json", "size": 2, "data": "e30=",
        "digest": "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
    });
    let docker = |name: &str, layer: &'static str| {
        let mut case = manifest(name, move |manifest| {
            manifest["mediaType"] = json!(DOCKER);
            manifest["config"]["mediaType"] = json!("application/vnd.docker.container.image.v1+json");
            manifest["layers"][0]["mediaType"] = json!(layer);
        });
        case.media_type = DOCKER.to_owned();
        case
    };
    let typed = |name: &str, media_type: &str| Case {
        media_type: media_type.to_owned(),
        ..Case::new(format!("manifest, {name}"))
    };
    vec![
        docker("Docker", "application/vnd.docker.image.rootfs.diff.tar.gzip"),
        docker("Docker's foreign layer", "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"),
        docker("Docker's plain layer", "application/vnd.docker.image.rootfs.diff.tar"),
        typed("answer without a type", ""),
        typed("answer as text", "text/plain"),
        typed("answer with a parameter", "application/vnd.oci.image.manifest.v1+json; charset=utf-8"),
        typed("answer as Docker's", DOCKER),
        typed("answer as an index", INDEX),
        set("no media type", "/mediaType", json!(null)),
        set("another media type", "/mediaType", json!("application/x")),
        set("media type of an index", "/mediaType", json!(INDEX)),
        set("schema 1", "/schemaVersion", json!(1)),
        set("schema 3", "/schemaVersion", json!(3)),
        set("schema missing", "/schemaVersion", json!(null)),
        set("schema as a text", "/schemaVersion", json!("2")),
        set("annotations", "/annotations", json!({ "a": "b" })),
        set("annotations with null", "/annotations", json!({ "a": null })),
        set("not used, annotations with a number", "/annotations", json!({ "a": 5 })),
        set("artifact type", "/artifactType", json!("application/x")),
        set("subject", "/subject", json!({ "mediaType": MANIFEST, "digest": zero, "size": 5 })),
        set("config of an unknown type", "/config/mediaType", json!("application/x")),
        set("config of an artifact", "/config/mediaType", json!("application/vnd.cncf.helm.config.v1+json")),
        set("config without a type", "/config/mediaType", json!("")),
        set("not understood, config is the empty descriptor", "/config", empty.clone()),
        set("config is null", "/config", json!(null)),
        set("config with a wrong size", "/config/size", json!(5)),
        set("config with a size that is too big", "/config/size", json!(1 << 30)),
        set("config with size 0", "/config/size", json!(0)),
        set("config with a negative size", "/config/size", json!(-1)),
        set("config with a size as a text", "/config/size", json!("5")),
        set("config with a wrong digest", "/config/digest", json!(zero)),
        set("config with an odd digest", "/config/digest", json!("md5:00")),
        set("config without a digest", "/config/digest", json!("")),
        set("not understood, layers null", "/layers", json!(null)),
        set("not understood, layers empty", "/layers", json!([])),
        set("layer null", "/layers/0", json!(null)),
        set("layer with a wrong size", "/layers/0/size", json!(5)),
        set("layer with size 0", "/layers/0/size", json!(0)),
        set("not understood, layer with a negative size", "/layers/0/size", json!(-1)),
        set("layer without a size", "/layers/0/size", json!(null)),
        set("layer with a wrong digest", "/layers/0/digest", json!(zero)),
        set("not understood, layer of an unknown type", "/layers/0/mediaType", json!("application/x")),
        set("layer without a type", "/layers/0/mediaType", json!("")),
        set(
            "layer that must not be distributed",
            "/layers/0/mediaType",
            json!("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"),
        ),
        set(
            "not understood, layer of an unknown compression",
            "/layers/0/mediaType",
            json!("application/vnd.oci.image.layer.v1.tar+lz4"),
        ),
        set(
            "not understood, layer that is encrypted",
            "/layers/0/mediaType",
            json!("application/vnd.oci.image.layer.v1.tar+gzip+encrypted"),
        ),
        set(
            "layer with another compression's type",
            "/layers/0/mediaType",
            json!("application/vnd.oci.image.layer.v1.tar+zstd"),
        ),
        set(
            "layer with a plain type",
            "/layers/0/mediaType",
            json!("application/vnd.oci.image.layer.v1.tar"),
        ),
        set("layer with urls", "/layers/0/urls", json!(["http://127.0.0.1:1/layer"])),
        set("layer with urls null", "/layers/0/urls", json!(null)),
        set("layer with annotations", "/layers/0/annotations", json!({ "a": "b" })),
        set("layer with data", "/layers/0/data", json!("e30=")),
        set("not used, layer with data that is not base64", "/layers/0/data", json!("*")),
        set(
            "layer with a platform",
            "/layers/0/platform",
            json!({ "os": "windows", "architecture": "arm64" }),
        ),
        manifest("a layer twice", |manifest| {
            let layer = manifest["layers"][0].clone();
            manifest["layers"].as_array_mut().expect("a list").push(layer);
        }),
        manifest("not understood, an empty descriptor as a layer", move |manifest| {
            manifest["layers"].as_array_mut().expect("a list").push(empty.clone());
        }),
        manifest("manifests and layers", |manifest| manifest["manifests"] = json!([])),
        manifest("is a list", |manifest| *manifest = json!([])),
        manifest("is empty", |manifest| *manifest = json!({})),
        {
            let mut case = Case {
                layers: vec![Archive::of(Vec::new()); 2],
                ..Case::new("manifest, the same layer twice")
            };
            case.name = "manifest, empty layers".to_owned();
            case
        },
        Case {
            layers: vec![
                Archive::of(vec![Member::file("f", "x")]),
                Archive::of(vec![Member::file("g", "x")]),
            ],
            change_config: Box::new(|document| {
                document["rootfs"]["diff_ids"].as_array_mut().expect("a list").swap(1, 2);
            }),
            ..Case::new("manifest, diff IDs in another order")
        },
    ]
}

fn index(name: &str, make: impl Fn(&Server, Value) -> Value + 'static) -> Case {
    Case { index: Some(Box::new(make)), ..Case::new(format!("index, {name}")) }
}

fn index_of(manifests: Vec<Value>) -> Value {
    json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests })
}

fn on(platform: Value, mut descriptor: Value) -> Value {
    descriptor["platform"] = platform;
    descriptor
}

/// A descriptor of nothing.
fn missing() -> Value {
    json!({ "mediaType": MANIFEST, "digest": format!("sha256:{}", "0".repeat(64)), "size": 5 })
}

fn indexes() -> Vec<Case> {
    let linux = |architecture: &str| json!({ "os": "linux", "architecture": architecture });
    let platform = |name: &str, platform: Value| {
        index(&format!("platform {name}"), move |_, descriptor| {
            index_of(vec![on(platform.clone(), descriptor)])
        })
    };
    let beside = |name: &str, other: Value| {
        index(&format!("beside {name}"), move |_, descriptor| {
            let ours = on(json!({ "os": "linux", "architecture": "amd64" }), descriptor);
            index_of(vec![on(other.clone(), missing()), ours])
        })
    };
    let amd64 = |key: &'static str, value: Value| {
        let mut platform = json!({ "os": "linux", "architecture": "amd64" });
        platform[key] = value;
        platform
    };
    let nested = |name: &str, depth: usize, has_platform: bool| {
        index(name, move |server, mut descriptor_of| {
            for level in 0..depth {
                let inner = index_of(vec![descriptor_of]).to_string();
                server.add_manifest(REPOSITORY, "", INDEX, inner.as_bytes());
                descriptor_of = descriptor(INDEX, inner.as_bytes());
                if has_platform && level == depth - 1 {
                    descriptor_of["platform"] = json!({ "os": "linux", "architecture": "amd64" });
                }
            }
            index_of(vec![descriptor_of])
        })
    };
    let mut cases = vec![
        index("without a platform", |_, descriptor| index_of(vec![descriptor])),
        index("empty", |_, _| index_of(Vec::new())),
        index("of null", |_, _| json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": null })),
        index("of Docker", |_, descriptor| {
            let mut index = index_of(vec![on(json!({ "os": "linux", "architecture": "amd64" }), descriptor)]);
            index["mediaType"] = json!("application/vnd.docker.distribution.manifest.list.v2+json");
            index
        }),
        index("without a media type", |_, descriptor| {
            let mut index = index_of(vec![descriptor]);
            index["mediaType"] = json!(null);
            index
        }),
        index("with annotations", |_, mut descriptor| {
            descriptor["annotations"] = json!({ "a": null });
            let mut index = index_of(vec![descriptor]);
            index["annotations"] = json!({ "a": null });
            index
        }),
        index("twice the same", |_, descriptor| index_of(vec![descriptor.clone(), descriptor])),
        index("with a wrong size", |_, mut descriptor| {
            descriptor["size"] = json!(5);
            index_of(vec![descriptor])
        }),
        index("with an artifact after it", |_, descriptor| {
            let artifact = on(json!({ "os": "unknown", "architecture": "unknown" }), missing());
            index_of(vec![on(json!({ "os": "linux", "architecture": "amd64" }), descriptor), artifact])
        }),
        index("with one of no platform before it", |_, descriptor| {
            index_of(vec![missing(), on(json!({ "os": "linux", "architecture": "amd64" }), descriptor)])
        }),
        index("with an unknown media type", |_, mut descriptor| {
            descriptor["mediaType"] = json!("application/x");
            index_of(vec![descriptor])
        }),
        index("without a descriptor's media type", |_, mut descriptor| {
            descriptor["mediaType"] = json!("");
            index_of(vec![descriptor])
        }),
        nested("nested once", 1, true),
        nested("nested once without a platform", 1, false),
        nested("nested 3 times", 3, false),
        nested("nested 6 times", 6, false),
        platform("null", json!(null)),
        platform("empty", json!({})),
        platform("without an os", json!({ "architecture": "amd64" })),
        platform("without an architecture", json!({ "os": "linux" })),
        platform("unknown", json!({ "os": "unknown", "architecture": "unknown" })),
        platform("of another os", json!({ "os": "windows", "architecture": "amd64" })),
        platform("with os.version", amd64("os.version", json!("10.0"))),
        platform("with os.features", amd64("os.features", json!(["x"]))),
        platform("with features", amd64("features", json!(["sse4"]))),
        platform("with a text", json!("linux/amd64")),
        beside("arm64", linux("arm64")),
        beside("windows", json!({ "os": "windows", "architecture": "amd64", "os.version": "10.0" })),
        beside("386", linux("386")),
        beside("amd64 v4", json!({ "os": "linux", "architecture": "amd64", "variant": "v9" })),
        beside("unknown", json!({ "os": "unknown", "architecture": "unknown" })),
    ];
    for variant in ["", "v1", "v2", "v3", "v4", "v5", "v9", "8", "x"] {
        cases.push(platform(&format!("variant {variant}"), amd64("variant", json!(variant))));
    }
    for architecture in
        ["x86_64", "x86-64", "AMD64", "aarch64", "arm64", "386", "i386", "i686", "amd64 ", "all"]
    {
        cases.push(platform(&format!("architecture {architecture}"), linux(architecture)));
    }
    cases.push(platform("os Linux", json!({ "os": "Linux", "architecture": "amd64" })));
    cases
}
