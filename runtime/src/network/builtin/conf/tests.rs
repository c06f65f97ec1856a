//! Which lists are ours, what they come to, and that nothing is ignored.

use coracle_job::{Attachment, PortMapping};

use super::{Main, Plan, plan};

const IPAM: &str = r#""ipam":{"type":"host-local","subnet":"10.1.0.0/24"}"#;

fn attachment() -> Attachment {
    Attachment {
        container_id: "c0ffee".into(),
        netns: "/run/netns/a".into(),
        interface: "eth0".into(),
        ..Attachment::default()
    }
}

fn list(plugins: &str) -> String {
    format!(r#"{{"cniVersion":"1.0.0","name":"pods","plugins":[{plugins}]}}"#)
}

fn planned(plugins: &str, attachment: &Attachment) -> Result<Plan, String> {
    plan(&list(plugins), attachment)
}

fn port() -> PortMapping {
    PortMapping { host_port: 8080, container_port: 80, protocol: "tcp".into(), host_ip: String::new() }
}

#[test]
fn a_list_of_built_in_plugins_is_ours() {
    let bridge = format!(r#"{{"type":"bridge",{IPAM}}}"#);
    let cases = [
        bridge.clone(),
        format!(r#"{{"type":"ptp","mtu":1400,"ipMasq":true,"dns":{{"search":["a"]}},{IPAM}}}"#),
        format!(r#"{{"type":"loopback"}},{bridge},{{"type":"portmap","capabilities":{{"portMappings":true}}}}"#),
        format!(r#"{bridge},{{"type":"bandwidth","ingressRate":0,"capabilities":{{"bandwidth":true}}}}"#),
        format!(r#"{bridge},{{"type":"portmap","snat":false,"markMasqBit":5,"conditionsV4":null,"conditionsV6":[]}}"#),
        format!(
            r#"{{"type":"bridge","bridge":"br-1","isGateway":true,"isDefaultGateway":true,"forceAddress":true,"ipMasq":false,
               "mtu":0,"hairpinMode":true,"promiscMode":false,"vlan":0,"macspoofchk":false,"args":{{}},"name":"x","cniVersion":"1.0.0",{IPAM}}}"#
        ),
        r#"{"type":"bridge","ipam":{"type":"host-local","dataDir":"/d","resolvConf":"","routes":[{"dst":"0.0.0.0/0"},{"dst":"10.9.1.1/16","gw":"10.1.0.9"}],
            "ranges":[[{"subnet":"10.1.0.0/24","rangeStart":"10.1.0.9","rangeEnd":"10.1.0.20","gateway":"10.1.0.254"}],[{"subnet":"fd00::/64"}]]}}"#
            .to_owned(),
        format!(r#"{{"type":"bridge","capabilities":{{"ipRanges":true,"bandwidth":false,"dns":true}},{IPAM}}}"#),
    ];
    for case in cases {
        assert!(planned(&case, &attachment()).is_ok(), "{case}: {:?}", planned(&case, &attachment()));
    }
}

#[test]
fn what_is_not_known_makes_the_list_the_plugins() {
    let bridge = format!(r#"{{"type":"bridge",{IPAM}}}"#);
    let cases = [
        (r#"{"type":"flannel"}"#.into(), "plugin 0, \"flannel\": not built in, or not in this place"),
        (
            format!(r#"{bridge},{{"type":"tuning"}}"#),
            "plugin 1, \"tuning\": not built in, or not in this place",
        ),
        (format!("{bridge},{bridge}"), "plugin 1, \"bridge\": not built in, or not in this place"),
        (
            format!(r#"{{"type":"portmap"}},{bridge}"#),
            "plugin 0, \"portmap\": not built in, or not in this place",
        ),
        (r#"{"type":"loopback"}"#.into(), "no plugin gives a link"),
        (format!(r#"{{"type":"bridge","vlan":5,{IPAM}}}"#), "plugin 0, \"bridge\": vlan: 5 is not built in"),
        (
            format!(r#"{{"type":"bridge","enabledad":true,{IPAM}}}"#),
            "plugin 0, \"bridge\": enabledad: true is not built in",
        ),
        (
            format!(r#"{{"type":"bridge","isgateway":true,{IPAM}}}"#),
            "plugin 0, \"bridge\": isgateway is not built in",
        ),
        (
            format!(r#"{{"type":"bridge","isGateway":"yes",{IPAM}}}"#),
            "plugin 0, \"bridge\": isGateway: \"yes\" is not built in",
        ),
        (format!(r#"{{"type":"bridge","mtu":-1,{IPAM}}}"#), "plugin 0, \"bridge\": mtu: -1 is not built in"),
        (
            format!(r#"{{"type":"bridge","bridge":"a/b",{IPAM}}}"#),
            "plugin 0, \"bridge\": a bridge's name or modes are wrong",
        ),
        (
            format!(r#"{{"type":"bridge","hairpinMode":true,"promiscMode":true,{IPAM}}}"#),
            "plugin 0, \"bridge\": a bridge's name or modes are wrong",
        ),
        (
            format!(r#"{{"type":"ptp","isGateway":true,{IPAM}}}"#),
            "plugin 0, \"ptp\": isGateway is not built in",
        ),
        (
            format!(r#"{bridge},{{"type":"portmap","conditionsV4":["-d","10.0.0.1"]}}"#),
            "plugin 1, \"portmap\": conditionsV4: [\"-d\",\"10.0.0.1\"] is not built in",
        ),
        (
            format!(r#"{bridge},{{"type":"portmap","backend":"nftables"}}"#),
            "plugin 1, \"portmap\": backend is not built in",
        ),
    ];
    for (plugins, expected) in cases {
        assert_eq!(planned(&plugins, &attachment()), Err(expected.to_owned()), "{plugins}");
    }
    let old = list(&bridge).replace("1.0.0", "0.2.0");
    assert_eq!(plan(&old, &attachment()), Err("cniVersion \"0.2.0\" is not built in".to_owned()));
    for text in ["", "[]", "{}", r#"{"cniVersion":"1.0.0","name":"..","plugins":[]}"#] {
        assert!(plan(text, &attachment()).is_err(), "{text}");
    }
}

#[test]
fn ranges_that_are_not_known_make_the_list_the_plugins() {
    let ipam = |more: &str| format!(r#"{{"type":"bridge","ipam":{{"type":"host-local",{more}}}}}"#);
    let cases = [
        (r#"{"type":"bridge"}"#.into(), "plugin 0, \"bridge\": no ipam"),
        (
            r#"{"type":"bridge","ipam":{"type":"dhcp"}}"#.into(),
            "plugin 0, \"bridge\": ipam other than host-local is not built in",
        ),
        (ipam(r#""subnet":"10.1.0.0/24","x":1"#), "plugin 0, \"bridge\": x is not built in"),
        (ipam(r#""rangeStart":"10.1.0.5""#), "plugin 0, \"bridge\": a range without a subnet"),
        (ipam(r#""ranges":[]"#), "plugin 0, \"bridge\": no range"),
        (ipam(r#""ranges":[[]]"#), "plugin 0, \"bridge\": a set without ranges"),
        (
            ipam(r#""subnet":"10.1.0.0/24","ranges":[[{"subnet":"10.1.0.0/16"}]]"#),
            "plugin 0, \"bridge\": ranges overlap at 10.1.0.0/16",
        ),
        (
            ipam(r#""ranges":[[{"subnet":"10.1.0.0/24"},{"subnet":"fd00::/64"}]]"#),
            "plugin 0, \"bridge\": a set of ranges of both families",
        ),
        (
            ipam(r#""subnet":"10.1.0.0/24","routes":[{"dst":"0.0.0.0/0","mtu":9}]"#),
            "plugin 0, \"bridge\": mtu is not built in",
        ),
        (
            ipam(r#""subnet":"10.1.0.0/24","resolvConf":"/etc/resolv.conf""#),
            "plugin 0, \"bridge\": resolvConf: \"/etc/resolv.conf\" is not built in",
        ),
    ];
    for (plugins, expected) in cases {
        assert_eq!(planned(&plugins, &attachment()), Err(expected.to_owned()), "{plugins}");
    }
}

#[test]
fn options_come_to_what_the_plugins_make_of_them() {
    let plugins = r#"{"type":"bridge","isDefaultGateway":true,"mtu":1400,"ipam":{"type":"host-local","subnet":"10.1.0.0/24",
        "ranges":[[{"subnet":"fd00::/64"}],[{"subnet":"10.2.0.0/24"}]],"routes":[{"dst":"10.9.0.0/16"}]}}"#;
    let plan = planned(plugins, &attachment()).unwrap();
    let Main::Bridge(bridge) = &plan.main else { panic!("{plan:?}") };
    assert_eq!((bridge.name.as_str(), bridge.is_gateway, plan.mtu), ("cni0", true, 1400));
    assert_eq!(plan.ipam.directory.to_str(), Some("/var/lib/cni/networks/pods"));
    let subnets: Vec<_> = plan.ipam.sets.iter().map(|set| set[0].subnet.to_string()).collect();
    assert_eq!(subnets, ["10.1.0.0/24", "fd00::/64", "10.2.0.0/24"], "the single range comes first");
    let routes: Vec<_> =
        plan.ipam.routes.iter().map(|route| format!("{} {:?}", route.destination, route.gateway)).collect();
    assert_eq!(routes, ["10.9.0.0/16 None", "0.0.0.0/0 Some(10.1.0.1)", "::/0 Some(fd00::1)"]);
    assert!(!plan.has_rules());
}

#[test]
fn capabilities_reach_only_plugins_that_declare_them() {
    let told = Attachment {
        port_mappings: vec![port()],
        capabilities: vec![
            ("ipRanges".into(), r#"[[{"subnet":"10.7.0.0/24"}]]"#.into()),
            ("mac".into(), r#""02::""#.into()),
        ],
        ..attachment()
    };
    let plugins = |bridge: &str, portmap: &str| {
        format!(
            r#"{{"type":"bridge","isGateway":true,"capabilities":{bridge},{IPAM}}},{{"type":"portmap","capabilities":{portmap}}}"#
        )
    };
    let deaf = planned(&plugins("{}", r#"{"portMappings":false}"#), &told).unwrap();
    assert_eq!((deaf.ipam.sets.len(), deaf.ports.len()), (1, 0));
    let plan = planned(&plugins(r#"{"ipRanges":true}"#, r#"{"portMappings":true}"#), &told).unwrap();
    assert_eq!(plan.ipam.sets[0][0].subnet.to_string(), "10.7.0.0/24", "what the node is told comes first");
    assert_eq!(plan.ipam.sets.len(), 2);
    assert_eq!(plan.ports[0].mappings, [port()]);
    assert_eq!((plan.ports[0].masquerades, plan.ports[0].mark), (true, 0x2000));
    assert!(plan.has_rules());
    let limited = Attachment {
        capabilities: vec![("bandwidth".into(), r#"{"ingressRate":1000}"#.into())],
        ..attachment()
    };
    let shaped =
        format!(r#"{{"type":"ptp",{IPAM}}},{{"type":"bandwidth","capabilities":{{"bandwidth":true}}}}"#);
    assert!(planned(&shaped, &attachment()).is_ok(), "a pod without limits");
    assert_eq!(
        planned(&shaped, &limited),
        Err("plugin 1, \"bandwidth\": limits are not built in".to_owned())
    );
    let error = planned(&plugins(r#"{"mac":true}"#, "{}"), &told).unwrap_err();
    assert_eq!(error, "plugin 0, \"bridge\": a capability is not built in");
    let no_gateway = plugins("{}", r#"{"portMappings":true}"#).replace(r#""isGateway":true,"#, "");
    let error = planned(&no_gateway, &told).unwrap_err();
    assert_eq!(error, "plugin 1, \"portmap\": ports of a bridge that is no gateway are not built in");
}

/// Whatever the bytes: an answer.
#[test]
fn damaged_lists_are_refused_or_planned() {
    let whole = list(&format!(
        r#"{{"type":"bridge","isDefaultGateway":true,"mtu":1400,{IPAM}}},{{"type":"portmap","capabilities":{{"portMappings":true}}}}"#
    ));
    let mut random: u64 = 9;
    for _ in 0..5000 {
        // xorshift64
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let mut bytes = whole.clone().into_bytes();
        let at = random as usize % bytes.len();
        bytes[at] = b"{}[]\",:0123456789/."[(random >> 40) as usize % 19];
        let _ = plan(&String::from_utf8(bytes).unwrap(), &attachment());
    }
}
