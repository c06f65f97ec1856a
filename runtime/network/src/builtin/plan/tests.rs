//! Tests which lists are built in, the resulting plans, and that no option is ignored.

use coracle_job::{Attachment, PortMapping};
use coracle_netlink::Rate;

use super::{Base, Choice, Firewall, Limits, Main, Part, Plan, choose, parts};

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

fn chosen(plugins: &str) -> Result<Choice, String> {
    choose(&list(plugins), &attachment(), &|_| Ok(()))
}

/// The plan of a list if all its plugins are built in, otherwise the reason.
fn plan(list: &str, attachment: &Attachment) -> Result<Plan, String> {
    if let Some(why) = choose(list, attachment, &|_| Ok(()))?.reasons.into_iter().next() {
        return Err(why);
    }
    let parts = parts(list, attachment, &|_| true)?;
    let [Part::BuiltIn(plan)] = &parts[..] else { panic!("{parts:?}") };
    Ok((**plan).clone())
}

fn planned(plugins: &str, attachment: &Attachment) -> Result<Plan, String> {
    plan(&list(plugins), attachment)
}

fn base(plan: &Plan) -> &Base {
    plan.base.as_ref().expect("the plan has a main plugin")
}

fn port() -> PortMapping {
    PortMapping { host_port: 8080, container_port: 80, protocol: "tcp".into(), host_ip: String::new() }
}

#[test]
fn lists_of_known_options_are_built_in() {
    let bridge = format!(r#"{{"type":"bridge",{IPAM}}}"#);
    let cases = [
        bridge.clone(),
        format!(r#"{{"type":"ptp","mtu":1400,"ipMasq":true,"dns":{{"search":["a"]}},{IPAM}}}"#),
        format!(r#"{{"type":"loopback"}},{bridge},{{"type":"portmap","capabilities":{{"portMappings":true}}}}"#),
        format!(r#"{bridge},{{"type":"firewall","backend":"iptables","iptablesAdminChainName":"CNI-ADMIN"}}"#),
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
fn unknown_plugins_and_options_are_left_to_programs() {
    let bridge = format!(r#"{{"type":"bridge",{IPAM}}}"#);
    let cases = [
        (r#"{"type":"flannel"}"#.into(), "plugin 0, \"flannel\": not built in, or not at this position"),
        (
            format!(r#"{bridge},{{"type":"tuning"}}"#),
            "plugin 1, \"tuning\": not built in, or not at this position",
        ),
        (format!("{bridge},{bridge}"), "plugin 1, \"bridge\": not built in, or not at this position"),
        (
            format!(r#"{{"type":"portmap"}},{bridge}"#),
            "plugin 0, \"portmap\": not built in, or not at this position",
        ),
        (r#"{"type":"loopback"}"#.into(), "no plugin that creates a link"),
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
            "plugin 0, \"bridge\": the bridge's name is invalid, or promiscMode and hairpinMode are both set",
        ),
        (
            format!(r#"{{"type":"bridge","hairpinMode":true,"promiscMode":true,{IPAM}}}"#),
            "plugin 0, \"bridge\": the bridge's name is invalid, or promiscMode and hairpinMode are both set",
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
fn unknown_ipam_options_are_left_to_programs() {
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
        (ipam(r#""ranges":[[]]"#), "plugin 0, \"bridge\": an empty set of ranges"),
        (
            ipam(r#""subnet":"10.1.0.0/24","ranges":[[{"subnet":"10.1.0.0/16"}]]"#),
            "plugin 0, \"bridge\": ranges overlap at 10.1.0.0/16",
        ),
        (
            ipam(r#""ranges":[[{"subnet":"10.1.0.0/24"},{"subnet":"fd00::/64"}]]"#),
            "plugin 0, \"bridge\": a set of ranges of both address families",
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
fn options_have_the_effect_that_the_plugins_document() {
    let plugins = r#"{"type":"bridge","isDefaultGateway":true,"mtu":1400,"ipam":{"type":"host-local","subnet":"10.1.0.0/24",
        "ranges":[[{"subnet":"fd00::/64"}],[{"subnet":"10.2.0.0/24"}]],"routes":[{"dst":"10.9.0.0/16"}]}}"#;
    let plan = planned(plugins, &attachment()).unwrap();
    let base = base(&plan);
    let Main::Bridge(bridge) = &base.main else { panic!("{plan:?}") };
    assert_eq!((bridge.name.as_str(), bridge.is_gateway, base.mtu), ("cni0", true, 1400));
    assert_eq!(base.ipam.directory.to_str(), Some("/var/lib/cni/networks/pods"));
    let subnets: Vec<_> = base.ipam.sets.iter().map(|set| set[0].subnet.to_string()).collect();
    assert_eq!(subnets, ["10.1.0.0/24", "fd00::/64", "10.2.0.0/24"], "the single range comes first");
    let routes: Vec<_> =
        base.ipam.routes.iter().map(|route| format!("{} {:?}", route.destination, route.gateway)).collect();
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
    assert_eq!((base(&deaf).ipam.sets.len(), deaf.ports.len()), (1, 0));
    let plan = planned(&plugins(r#"{"ipRanges":true}"#, r#"{"portMappings":true}"#), &told).unwrap();
    assert_eq!(
        base(&plan).ipam.sets[0][0].subnet.to_string(),
        "10.7.0.0/24",
        "the capability argument has precedence"
    );
    assert_eq!(base(&plan).ipam.sets.len(), 2);
    assert_eq!(plan.ports[0].mappings, [port()]);
    assert_eq!((plan.ports[0].masquerades, plan.ports[0].mark), (true, 0x2000));
    assert!(plan.has_rules());
    let error = planned(&plugins(r#"{"mac":true}"#, "{}"), &told).unwrap_err();
    assert_eq!(error, "plugin 0, \"bridge\": a declared capability is not built in");
}

#[test]
fn limits_are_those_of_the_list_or_of_the_pod() {
    let limits = |options: &str, told: &str| {
        let plugins = format!(r#"{{"type":"ptp",{IPAM}}},{{"type":"bandwidth"{options}}}"#);
        let capabilities = vec![("bandwidth".to_owned(), told.to_owned())];
        let capabilities = if told.is_empty() { Vec::new() } else { capabilities };
        planned(&plugins, &Attachment { capabilities, ..attachment() }).map(|plan| plan.limits)
    };
    let rate = |bytes_per_second, burst_bytes| Some(Rate { bytes_per_second, burst_bytes });
    let (deaf, hears) = (r#","capabilities":{"bandwidth":false}"#, r#","capabilities":{"bandwidth":true}"#);
    let told = r#"{"ingressRate":8000,"ingressBurst":4294967295}"#;
    let of_pod = Limits { ingress: rate(1000, 536_870_911), egress: None };
    assert_eq!(limits(hears, ""), Ok(Limits::default()));
    assert_eq!(limits(deaf, told), Ok(Limits::default()));
    assert_eq!(limits(hears, told), Ok(of_pod));
    let of_list = r#","egressRate":16000,"egressBurst":800,"capabilities":{"bandwidth":true}"#;
    assert_eq!(limits(of_list, told), Ok(Limits { ingress: None, egress: rate(2000, 100) }));
    let none = r#","egressRate":0,"capabilities":{"bandwidth":true}"#;
    assert_eq!(
        limits(none, told),
        Ok(Limits::default()),
        "limits of the list have precedence, even if they are zero"
    );
    for (options, why) in [
        (r#","ingressRate":1000"#, "1000 bits per second with a burst of 0 are not built in"),
        (r#","egressBurst":1000"#, "0 bits per second with a burst of 1000 are not built in"),
        (r#","egressRate":7,"egressBurst":8"#, "7 bits per second with a burst of 8 are not built in"),
        (
            r#","egressRate":8,"egressBurst":34359738360"#,
            "8 bits per second with a burst of 34359738360 are not built in",
        ),
        (r#","ingressRate":-1"#, "ingressRate: -1 is not built in"),
        (r#","shapedSubnets":["10.0.0.0/8"]"#, "shapedSubnets is not built in"),
    ] {
        assert_eq!(limits(options, ""), Err(format!("plugin 1, \"bandwidth\": {why}")), "{options}");
    }
}

#[test]
fn a_list_is_split_where_programs_begin_and_end() {
    let bridge = format!(r#"{{"type":"bridge",{IPAM}}}"#);
    let (portmap, tuning) = (r#"{"type":"portmap"}"#, r#"{"type":"tuning", "mtu" : 1e3}"#);
    let firewall = r#"{"type":"firewall","backend":"","firewalldZone":"trusted","ingressPolicy":"open"}"#;
    let loopback = r#"{"type":"loopback"}"#;
    let shape = |plugins: &[&str]| {
        let text = list(&plugins.join(","));
        let places = choose(&text, &attachment(), &|_| Ok(())).unwrap().places;
        let parts = parts(&text, &attachment(), &|place| places.contains(&place)).unwrap();
        let line = parts.iter().map(|part| match part {
            Part::BuiltIn(plan) => {
                format!("{}{}", u8::from(plan.base.is_some()), u8::from(plan.firewall.is_some()))
            }
            Part::Programs(text) => text.clone(),
        });
        line.collect::<Vec<_>>().join(" ")
    };
    let flannel = r#"{"type":"flannel","delegate":{"isDefaultGateway":true}}"#;
    let cases: [(&[&str], String); 6] = [
        (&[&bridge, portmap, firewall], "11".into()),
        (&[flannel, portmap, firewall], format!("{} 01", list(flannel))),
        (&[&bridge, tuning, firewall], format!("10 {} 01", list(tuning))),
        (&[&bridge, portmap, tuning], format!("10 {}", list(tuning))),
        (&[loopback, tuning, tuning, loopback], format!("{} 00", list(&format!("{tuning},{tuning}")))),
        (&[flannel, &bridge], list(&format!("{flannel},{bridge}"))),
    ];
    for (plugins, expected) in cases {
        assert_eq!(shape(plugins), expected, "{plugins:?}");
    }
    let text = list(&format!("{flannel},{portmap}"));
    let why = "plugin 0, \"flannel\": not built in, or not at this position";
    assert_eq!(parts(&text, &attachment(), &|_| true), Err(why.to_owned()));
}

#[test]
fn firewall_is_built_in_if_the_packet_filter_check_succeeds() {
    let plugins = |options: &str| format!(r#"{{"type":"ptp",{IPAM}}},{{"type":"firewall"{options}}}"#);
    let asked = std::cell::Cell::new(None);
    let filter = |firewall: Firewall| {
        asked.set(Some(firewall.prefers_firewalld));
        Err("another's".to_owned())
    };
    for (options, prefers_firewalld) in [("", true), (r#","backend":"iptables""#, false)] {
        let choice = choose(&list(&plugins(options)), &attachment(), &filter).unwrap();
        assert_eq!((choice.places, asked.take()), (vec![0], Some(prefers_firewalld)));
        assert_eq!(choice.reasons, ["plugin 1, \"firewall\": another's"]);
    }
    for (options, why) in [
        (r#","backend":"firewalld""#, "backend: \"firewalld\" is not built in"),
        (r#","ingressPolicy":"same-bridge""#, "ingressPolicy: \"same-bridge\" is not built in"),
        (r#","iptablesAdminChainName":"MINE""#, "iptablesAdminChainName: \"MINE\" is not built in"),
    ] {
        let reasons = chosen(&plugins(options)).unwrap().reasons;
        assert_eq!(reasons, [format!("plugin 1, \"firewall\": {why}")]);
    }
    let old = list(&plugins("")).replace("\"1.0.0\"", "\"0.3.1\"");
    let why = "plugin 1, \"firewall\": not built in before 0.4.0";
    assert_eq!(plan(&old, &attachment()), Err(why.to_owned()));
}

/// Any input is either refused or results in a plan.
#[test]
fn damaged_lists_are_refused_or_planned() {
    let whole = list(&format!(
        r#"{{"type":"bridge","isDefaultGateway":true,"mtu":1400,{IPAM}}},{{"type":"portmap","capabilities":{{"portMappings":true}}}},
           {{"type":"bandwidth","egressRate":16000,"egressBurst":800}},{{"type":"firewall","backend":""}}"#
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
        let text = String::from_utf8(bytes).unwrap();
        if let Ok(choice) = choose(&text, &attachment(), &|_| Ok(())) {
            let parts = parts(&text, &attachment(), &|place| choice.places.contains(&place));
            assert!(parts.is_ok(), "what is chosen can be ours: {text}: {parts:?}");
        }
    }
}
