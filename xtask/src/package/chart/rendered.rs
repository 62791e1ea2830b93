//! What the charts render, read as Kubernetes reads it, and the configuration in it as the daemons do.

use super::super::{Package, Programs, empty, folder, oci};
use super::{CHARTS, unpacked};
use anyhow::{Context, Result, bail, ensure};
use harmonaize_testkit::kubernetes::Kubernetes;
use harmonaize_testkit::packages::Consent;
use harmonaize_testkit::workspace;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// What a chart renders: every object, by kind and name.
struct Rendered {
    objects: BTreeMap<String, Value>,
}

/// Lints the charts, renders them by several values, and has them refuse values that are wrong. It holds what comes of it against the API,
/// the images and the daemons.
pub(in super::super) fn test(package: &Package, programs: &Programs, consent: Consent) -> Result<()> {
    let kubernetes = Kubernetes::prepare(consent)?;
    let tests = Tests { kubernetes, package, programs, home: folder().join("rendered") };
    empty(&tests.home)?;
    for chart in CHARTS {
        tests.helm(&["lint", "--strict"], chart, &json!({}))?;
    }
    let defaults = tests.render("harmonaize", &json!({}))?;
    defaults.has(
        "ConfigMap/r-agent ConfigMap/r-control DaemonSet/r-agent Service/r-control StatefulSet/r-control",
    )?;
    let capabilities = defaults
        .list("DaemonSet/r-agent", "/spec/template/spec/containers/0/securityContext/capabilities/add")?;
    ensure!(
        capabilities == unit_capabilities()?,
        "the chart's capabilities are not the unit's: {capabilities:?}"
    );
    several(&tests)?;
    everything(&tests)?;
    extender(&tests)?;
    parts(&tests)?;
    offload_units(&tests)?;
    let refused = wrong_values();
    for (chart, values, complaint) in &refused {
        let error = tests.helm(&["template", "r"], chart, values).err();
        let error = error.with_context(|| format!("{chart} takes {values}"))?.to_string();
        ensure!(error.contains(complaint), "{chart} refuses {values} with: {error}");
    }
    println!(
        "the charts render what Kubernetes, images and daemons take, and refuse {} wrong values",
        refused.len()
    );
    Ok(())
}

/// Several controls share etcd, and agents know all of them.
fn several(tests: &Tests) -> Result<()> {
    let rendered = tests.render(
        "harmonaize",
        &json!({ "control": {
            "replicas": 3,
            "etcd": ["10.65.0.1:2379", "10.65.0.2:2379", "10.65.0.3:2379"],
            "operators": [{ "name": "alice", "role": "admin" }, { "name": "bob", "role": "viewer" }],
            "settings": { "turns": false, "lease": "60s", "paths": 2 },
            "tables": "[[tenant]]\nname = \"a\"\nhosts = [\"h0\"]\n",
            "resources": { "limits": { "memory": "4Gi" } },
            "nodeSelector": { "role": "control" },
            "tolerations": [{ "key": "control", "operator": "Exists" }],
        } }),
    )?;
    let set = rendered.object("StatefulSet/r-control")?;
    ensure!(set.pointer("/spec/volumeClaimTemplates").is_none(), "controls with etcd have volumes");
    ensure!(set.pointer("/spec/replicas") == Some(&json!(3)), "not three controls: {set}");
    let control = rendered.configuration("ConfigMap/r-control", "control.toml")?;
    let expected = "
        listen = '0.0.0.0:7000'\nlisten_operators = '0.0.0.0:7000'\ntls = '/etc/harmonaize/tls'\ntopology = 'topology.toml'
        etcd = ['10.65.0.1:2379', '10.65.0.2:2379', '10.65.0.3:2379']\nturns = false\nlease = '60s'\npaths = 2
        operator = [{ name = 'alice', role = 'admin' }, { name = 'bob', role = 'viewer' }]
        tenant = [{ name = 'a', hosts = ['h0'] }]";
    same(&control, expected)?;
    let agent = rendered.configuration("ConfigMap/r-agent", "h1.toml")?;
    let expected = "
        host = 'h1'\ntls = '/etc/harmonaize/tls/h1'\nlisten = '10.64.0.2:7100'
        control = ['r-control-0.r-control.n.svc:7000', 'r-control-1.r-control.n.svc:7000', 'r-control-2.r-control.n.svc:7000']
        control_tenants.sockets = '/run/harmonaize/tenants'";
    same(&agent, expected)
}

/// Each value that may be left out.
fn everything(tests: &Tests) -> Result<()> {
    let rendered = tests.render(
        "harmonaize",
        &json!({
            "image": { "registry": "r.example:5000/p", "tag": "t1", "pullPolicy": "Always", "pullSecrets": [{ "name": "pull" }] },
            "control": { "storage": { "size": "2Gi", "className": "fast" } },
            "agent": {
                "hosts": [{ "name": "h0", "listen": "10.64.0.1:7100", "node": "n0.example" }],
                "tlsPath": "/etc/h/tls",
                "socketsPath": "/run/h",
                "tenantSecret": "secrets",
                "rdma": { "resource": "rdma/hca" },
                "settings": { "spin": "20us" },
                "tables": "[links]\nprotection = \"encrypted\"\n",
                "resources": { "limits": { "memory": "8Gi" } },
                "tolerations": [{ "operator": "Exists" }],
            },
            "aggregators": [{ "name": "agg0", "listen": "10.64.0.100:7400", "node": "n9", "tlsSecret": "agg0-tls" }],
            "serviceMonitor": { "enabled": true, "interval": "30s", "labels": { "release": "prometheus" } },
            "serviceDaemonSet": {
                "labels": { "svc.dpu.nvidia.com/service": "s" },
                "annotations": { "a": "b" },
                "updateStrategy": { "type": "RollingUpdate" },
            },
        }),
    )?;
    rendered.has(
        "ConfigMap/r-agent ConfigMap/r-agg0 ConfigMap/r-control DaemonSet/r-agent Deployment/r-agg0 Service/r-agent-metrics \
         Service/r-aggregator-metrics Service/r-control ServiceMonitor/r StatefulSet/r-control",
    )?;
    let agent = rendered.configuration("ConfigMap/r-agent", "n0.example.toml")?;
    let expected = "
        host = 'h0'\ncontrol = ['r-control-0.r-control.n.svc:7000']\ntls = '/etc/harmonaize/tls/h0'\nlisten = '10.64.0.1:7100'
        metrics = '0.0.0.0:9477'\nspin = '20us'\ncontrol_tenants.sockets = '/run/harmonaize/tenants'\nlinks.protection = 'encrypted'";
    same(&agent, expected)?;
    let aggregator = rendered.configuration("ConfigMap/r-agg0", "aggregator.toml")?;
    let expected = "
        name = 'agg0'\ncontrol = ['r-control-0.r-control.n.svc:7000']\ntls = '/etc/harmonaize/tls'\nlisten = '10.64.0.100:7400'
        metrics = '0.0.0.0:9478'";
    same(&aggregator, expected)?;
    let set = rendered.object("DaemonSet/r-agent")?;
    for (path, expected) in [
        ("/spec/updateStrategy", json!({ "type": "RollingUpdate" })),
        ("/spec/template/metadata/labels/svc.dpu.nvidia.com~1service", json!("s")),
        ("/spec/template/metadata/annotations", json!({ "a": "b" })),
        ("/spec/template/spec/imagePullSecrets", json!([{ "name": "pull" }])),
        ("/spec/template/spec/containers/0/image", json!("r.example:5000/p/harmonaize-agent:t1")),
        (
            "/spec/template/spec/containers/0/resources",
            json!({ "limits": { "memory": "8Gi", "rdma/hca": "1" } }),
        ),
        ("/spec/template/spec/tolerations", json!([{ "operator": "Exists" }])),
    ] {
        ensure!(set.pointer(path) == Some(&expected), "{path} is not {expected}: {set}");
    }
    let added = rendered
        .list("DaemonSet/r-agent", "/spec/template/spec/containers/0/securityContext/capabilities/add")?;
    ensure!(added.contains("IPC_LOCK"), "RDMA without the right to lock memory: {added:?}");
    // Prometheus' own kind, which the API's models have not.
    let expected = json!({
        "selector": { "matchLabels": { "app.kubernetes.io/name": "harmonaize", "app.kubernetes.io/instance": "r" } },
        "endpoints": [{ "port": "metrics", "interval": "30s" }],
    });
    let monitor = rendered.object("ServiceMonitor/r")?;
    ensure!(monitor.get("spec") == Some(&expected), "another monitor: {monitor}");
    for service in ["Service/r-agent-metrics", "Service/r-aggregator-metrics", "Service/r-control"] {
        let service = rendered.object(service)?;
        let named = |port: &Value| port.get("name") == Some(&json!("metrics"));
        let ports = service.pointer("/spec/ports").and_then(Value::as_array);
        ensure!(ports.is_some_and(|ports| ports.iter().any(named)), "no metrics at {service}");
    }
    Ok(())
}

/// Kubernetes' scheduler finds each control.
fn extender(tests: &Tests) -> Result<()> {
    let rendered = tests.render(
        "harmonaize",
        &json!({ "schedulerExtender": { "enabled": true }, "control": { "replicas": 2, "etcd": ["10.65.0.1:2379"] } }),
    )?;
    rendered.has(
        "ConfigMap/r-agent ConfigMap/r-control DaemonSet/r-agent Service/r-control Service/r-extender-0 Service/r-extender-1 \
         StatefulSet/r-control",
    )?;
    let control = rendered.configuration("ConfigMap/r-control", "control.toml")?;
    let asked = control.get("scheduler_extender").and_then(toml::Value::as_str);
    ensure!(asked == Some("0.0.0.0:9480"), "the scheduler is to ask at {asked:?}");
    let service = rendered.object("Service/r-extender-1")?;
    let expected = json!({
        "selector": { "statefulset.kubernetes.io/pod-name": "r-control-1" },
        "ports": [{ "name": "extender", "port": 9480 }],
    });
    ensure!(service.get("spec") == Some(&expected), "another service: {service}");
    let ports = rendered
        .object("StatefulSet/r-control")?
        .pointer("/spec/template/spec/containers/0/ports/1/containerPort");
    ensure!(ports == Some(&json!(9480)), "the port is {ports:?}");
    Ok(())
}

/// Agents without control, and control without agents.
fn parts(tests: &Tests) -> Result<()> {
    let away =
        json!({ "control": { "enabled": false }, "controlAddresses": ["10.65.0.1:7000", "10.65.0.2:7000"] });
    let agents = tests.render("harmonaize", &away)?;
    agents.has("ConfigMap/r-agent DaemonSet/r-agent")?;
    let agent = agents.configuration("ConfigMap/r-agent", "h0.toml")?;
    let control = agent.get("control").map(ToString::to_string).unwrap_or_default();
    ensure!(control == r#"["10.65.0.1:7000", "10.65.0.2:7000"]"#, "agents look for {control}");
    let control = tests.render("harmonaize", &json!({ "agent": { "enabled": false } }))?;
    control.has("ConfigMap/r-control Service/r-control StatefulSet/r-control")
}

/// What DPF makes of its object. It is the chart that it names, with the values in it and those that DPF
/// adds.
fn offload_units(tests: &Tests) -> Result<()> {
    let selector =
        json!({ "nodeSelectorTerms": [{ "matchExpressions": [{ "key": "dpu", "operator": "Exists" }] }] });
    let given = json!({ "repoURL": "https://r.example/charts", "nodeSelector": selector, "resources": { "nvidia.com/bf_sf": "1" } });
    for (values, url) in
        [(json!({}), "oci://registry.invalid/harmonaize/charts"), (given, "https://r.example/charts")]
    {
        let rendered = tests.render("harmonaize-dpf", &values)?;
        rendered.has("DPUService/r")?;
        let service = rendered.object("DPUService/r")?;
        let source = json!({ "repoURL": url, "chart": "harmonaize", "version": tests.package.version, "releaseName": "r" });
        let mut spec = service.get("spec").and_then(Value::as_object).cloned().unwrap_or_default();
        let chart = spec.remove("helmChart").context("no chart")?;
        ensure!(chart.get("source") == Some(&source), "another source: {chart}");
        let mut values = chart.get("values").context("no values")?.clone();
        if let (Some(added), Some(values)) = (spec.remove("serviceDaemonSet"), values.as_object_mut()) {
            values.insert("serviceDaemonSet".into(), added);
        }
        ensure!(
            Value::Object(spec) == json!({ "security": { "privileged": false } }),
            "other fields: {service}"
        );
        let agents = tests.render("harmonaize", &values)?;
        agents.has("ConfigMap/r-agent DaemonSet/r-agent")?;
        agents.configuration("ConfigMap/r-agent", "dpu0.toml")?;
        if values.get("serviceDaemonSet").is_some() {
            let set = agents.object("DaemonSet/r-agent")?;
            let chosen =
                "/spec/template/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution";
            ensure!(set.pointer(chosen) == Some(&selector), "other nodes: {set}");
            let amounts =
                json!({ "limits": { "nvidia.com/bf_sf": "1" }, "requests": { "nvidia.com/bf_sf": "1" } });
            ensure!(
                set.pointer("/spec/template/spec/containers/0/resources") == Some(&amounts),
                "other amounts: {set}"
            );
        }
    }
    Ok(())
}

/// Values that a chart refuses, and a word of what it says.
fn wrong_values() -> Vec<(&'static str, Value, &'static str)> {
    let hosts = |host: Value| json!({ "agent": { "hosts": [host] } });
    let dpf = |values: Value| json!({ "harmonaize": values });
    vec![
        ("harmonaize", json!({ "agents": {} }), "agents"),
        ("harmonaize", json!({ "image": { "registry": "r/" } }), "registry"),
        ("harmonaize", json!({ "image": { "tag": "a+b" } }), "tag"),
        ("harmonaize", json!({ "topology": "" }), "topology"),
        ("harmonaize", json!({ "control": { "replicas": 3 } }), "etcd"),
        ("harmonaize", json!({ "control": { "replicas": 0 } }), "replicas"),
        ("harmonaize", json!({ "control": { "enabled": false } }), "controlAddresses"),
        (
            "harmonaize",
            json!({ "control": { "enabled": false }, "controlAddresses": ["10.65.0.1:7000"], "schedulerExtender": { "enabled": true } }),
            "schedulerExtender",
        ),
        (
            "harmonaize",
            json!({ "control": { "settings": { "scheduler_extender": "0.0.0.0:1" } } }),
            "settings",
        ),
        ("harmonaize", json!({ "control": { "operators": [{ "name": "a", "role": "root" }] } }), "role"),
        ("harmonaize", json!({ "control": { "settings": { "listen": "0.0.0.0:1" } } }), "settings"),
        ("harmonaize", json!({ "control": { "settings": { "tenant": { "name": "a" } } } }), "settings"),
        ("harmonaize", json!({ "agent": { "settings": { "metrics": "0.0.0.0:1" } } }), "settings"),
        ("harmonaize", json!({ "agent": { "hosts": [] } }), "hosts"),
        ("harmonaize", json!({ "agent": { "capabilities": ["net_raw"] } }), "capabilities"),
        ("harmonaize", json!({ "agent": { "tlsPath": "tls" } }), "tlsPath"),
        ("harmonaize", hosts(json!({ "name": "h0" })), "listen"),
        ("harmonaize", hosts(json!({ "name": "../h0", "listen": "10.0.0.1:1" })), "name"),
        ("harmonaize", hosts(json!({ "name": "h0", "listen": "10.0.0.1" })), "listen"),
        (
            "harmonaize",
            json!({ "aggregators": [{ "name": "agent", "listen": "10.0.0.1:1", "node": "n", "tlsSecret": "s" }] }),
            "name",
        ),
        ("harmonaize", json!({ "serviceMonitor": { "enabled": "yes" } }), "enabled"),
        ("harmonaize-dpf", json!({ "repoURL": "http://r.example" }), "repoURL"),
        ("harmonaize-dpf", dpf(json!({ "controlAddresses": [] })), "controlAddresses"),
        ("harmonaize-dpf", dpf(json!({ "control": { "enabled": true } })), "control"),
    ]
}

struct Tests<'a> {
    kubernetes: Kubernetes,
    package: &'a Package<'a>,
    programs: &'a Programs,
    home: PathBuf,
}

impl Tests<'_> {
    /// What helm prints of a chart by these values, beside its defaults.
    fn helm(&self, call: &[&str], chart: &str, values: &Value) -> Result<String> {
        let file = self.home.join("values.json");
        fs::write(&file, values.to_string())?;
        let mut helm = self.kubernetes.helm();
        helm.args(call).arg(unpacked().join(chart)).args(["--namespace", "n", "--values"]).arg(&file);
        let output = helm.output().context("cannot start helm")?;
        let printed = String::from_utf8(output.stdout)?;
        if !output.status.success() {
            bail!(
                "helm {} {chart}, with {values}: {printed}{}",
                call.join(" "),
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(printed)
    }

    /// Renders a chart as the release `r` in the namespace `n`, and checks what each of its objects must be.
    fn render(&self, chart: &str, values: &Value) -> Result<Rendered> {
        let text = self.helm(&["template", "r"], chart, values)?;
        let documents: Vec<Value> = serde_saphyr::from_multiple(&text).context("helm prints no YAML")?;
        let mut objects = BTreeMap::new();
        for object in documents {
            let text = |path: &str| object.pointer(path).and_then(Value::as_str).map(str::to_owned);
            let (kind, name) =
                (text("/kind").context("no kind")?, text("/metadata/name").context("no name")?);
            ensure!(name == "r" || name.starts_with("r-"), "{kind}/{name} is of no release");
            let other = objects.insert(format!("{kind}/{name}"), object);
            ensure!(other.is_none(), "{kind}/{name} is there twice");
        }
        let rendered = Rendered { objects };
        self.fields(&rendered)?;
        let tag = match values.pointer("/image/tag").and_then(Value::as_str) {
            Some(tag) => tag.to_owned(),
            None => oci::tag(self.package.version),
        };
        for (object, pod) in rendered.pods() {
            rendered
                .connected(object, pod)
                .and_then(|()| confined(pod, &tag))
                .with_context(|| object.to_owned())?;
        }
        self.configurations(&rendered)?;
        Ok(rendered)
    }

    /// Has the API's models read all objects of its own kinds.
    fn fields(&self, rendered: &Rendered) -> Result<()> {
        let own = |object: &&Value| {
            object
                .get("apiVersion")
                .and_then(Value::as_str)
                .is_some_and(|version| ["v1", "apps/v1"].contains(&version))
        };
        let lines: String =
            rendered.objects.values().filter(own).map(|object| format!("{object}\n")).collect();
        let mut python = self.kubernetes.python();
        python.arg(workspace::root().join("xtask/package/fields.py"));
        let mut child = python.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        child.stdin.take().context("no pipe")?.write_all(lines.as_bytes())?;
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// Has the daemons read their configuration.
    fn configurations(&self, rendered: &Rendered) -> Result<()> {
        for (object, data) in rendered.data() {
            let folder = self.home.join("config");
            empty(&folder)?;
            for (file, text) in data {
                fs::write(folder.join(file), text.as_str().context("no text")?)?;
            }
            for file in data.keys().filter(|file| *file != "topology.toml") {
                let (name, role): (_, &[&str]) = match file.as_str() {
                    "control.toml" => ("harmonaize-control", &[]),
                    "aggregator.toml" => ("harmonaize-agent", &["--role", "aggregator"]),
                    _ => ("harmonaize-agent", &[]),
                };
                let program = self.programs.paths.iter().find(|(program, _)| *program == name);
                let (_, program) = program.with_context(|| format!("there is no {name}"))?;
                let output = Command::new(program)
                    .args(role)
                    .arg("--config")
                    .arg(folder.join(file))
                    .arg("--check")
                    .output()?;
                let said = String::from_utf8_lossy(&output.stderr);
                ensure!(output.status.success(), "{name} refuses {file} of {object}: {said}");
            }
        }
        Ok(())
    }
}

impl Rendered {
    /// An error unless these are the objects, named with blanks between.
    fn has(&self, expected: &str) -> Result<()> {
        let found: Vec<&str> = self.objects.keys().map(String::as_str).collect();
        ensure!(found.join(" ") == expected, "these are rendered: {found:?}");
        Ok(())
    }

    fn object(&self, name: &str) -> Result<&Value> {
        self.objects.get(name).with_context(|| format!("{name} is not rendered"))
    }

    /// The texts of a list.
    fn list(&self, object: &str, path: &str) -> Result<BTreeSet<String>> {
        let list = self.object(object)?.pointer(path).with_context(|| format!("{object} has no {path}"))?;
        Ok(serde_json::from_value(list.clone())?)
    }

    /// A configuration file of a map.
    fn configuration(&self, map: &str, file: &str) -> Result<toml::Table> {
        let text = self.object(map)?.get("data").and_then(|data| data.get(file)?.as_str());
        Ok(text.with_context(|| format!("{map} has no {file}"))?.parse()?)
    }

    /// The files of each map.
    fn data(&self) -> impl Iterator<Item = (&str, &serde_json::Map<String, Value>)> {
        self.objects
            .iter()
            .filter_map(|(name, object)| Some((name.as_str(), object.get("data")?.as_object()?)))
    }

    /// What makes pods, with the template of them.
    fn pods(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.objects
            .iter()
            .filter_map(|(name, object)| Some((name.as_str(), object.pointer("/spec/template")?)))
    }

    /// An error unless a pod is selected by what makes it, and mounts just what there is.
    fn connected(&self, owner: &str, pod: &Value) -> Result<()> {
        let owner = self.object(owner)?;
        let labels = pod.pointer("/metadata/labels").context("a pod without labels")?;
        let selects = |selector: &Value| {
            selector.as_object().is_some_and(|all| {
                !all.is_empty() && all.iter().all(|(key, value)| labels.get(key) == Some(value))
            })
        };
        let selector = owner.pointer("/spec/selector/matchLabels").context("no selector")?;
        ensure!(selects(selector), "{selector} does not select {labels}");
        let others = self.pods().filter(|(_, other)| {
            let labels = other.pointer("/metadata/labels");
            selector
                .as_object()
                .into_iter()
                .flatten()
                .all(|(key, value)| labels.and_then(|all| all.get(key)) == Some(value))
        });
        ensure!(others.count() == 1, "{selector} selects pods of others, too");
        let names = |value: Option<&Value>, key: &str| -> BTreeSet<String> {
            let all = value.and_then(Value::as_array).into_iter().flatten();
            all.filter_map(|one| one.pointer(key)?.as_str().map(str::to_owned)).collect()
        };
        let mut volumes = names(pod.pointer("/spec/volumes"), "/name");
        volumes.extend(names(owner.pointer("/spec/volumeClaimTemplates"), "/metadata/name"));
        let mounted = names(pod.pointer("/spec/containers/0/volumeMounts"), "/name");
        ensure!(mounted == volumes, "volumes {volumes:?}, of which {mounted:?} are mounted");
        for map in names(pod.pointer("/spec/volumes"), "/configMap/name") {
            self.object(&format!("ConfigMap/{map}"))?;
        }
        Ok(())
    }
}

/// An error unless a pod runs one of the images, by the user of that. The pod may do no more than it must.
fn confined(pod: &Value, tag: &str) -> Result<()> {
    let spec = pod.get("spec").context("no specification")?;
    let one = |path: &str| spec.pointer(path).with_context(|| format!("no {path}"));
    let image = one("/containers/0/image")?.as_str().unwrap_or_default();
    let (name, found) =
        image.rsplit('/').next().and_then(|last| last.split_once(':')).context("an image without a tag")?;
    let made = oci::IMAGES.iter().find(|made| made.name == name);
    let user = made.with_context(|| format!("nobody makes the image {image}"))?.user;
    ensure!(found == tag, "the image {image} has not the tag {tag}");
    let runs = spec
        .pointer("/containers/0/securityContext/runAsUser")
        .or_else(|| spec.pointer("/securityContext/runAsUser"));
    ensure!(
        user.split(':').next() == runs.map(ToString::to_string).as_deref(),
        "{image} runs as {runs:?}, not {user}"
    );
    for (path, expected) in [
        ("/automountServiceAccountToken", json!(false)),
        ("/containers/0/securityContext/allowPrivilegeEscalation", json!(false)),
        ("/containers/0/securityContext/readOnlyRootFilesystem", json!(true)),
        ("/containers/0/securityContext/capabilities/drop", json!(["ALL"])),
    ] {
        ensure!(*one(path)? == expected, "{path} is not {expected}");
    }
    let seccomp = ["/securityContext", "/containers/0/securityContext"]
        .map(|at| spec.pointer(&format!("{at}/seccompProfile/type")));
    ensure!(seccomp.contains(&Some(&json!("RuntimeDefault"))), "every system call is open");
    ensure!(one("/containers")?.as_array().is_some_and(|all| all.len() == 1), "not one container");
    Ok(())
}

/// What the agent's unit may do, as Kubernetes names it.
fn unit_capabilities() -> Result<BTreeSet<String>> {
    let path = workspace::root().join("xtask/package/systemd/harmonaize-agent.service");
    let unit = fs::read_to_string(&path)?;
    let line = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    let names = line.context("the unit bounds no capabilities")?.split_whitespace();
    Ok(names.map(|name| name.trim_start_matches("CAP_").to_owned()).collect())
}

/// An error unless a configuration is this one.
fn same(found: &toml::Table, expected: &str) -> Result<()> {
    let expected: toml::Table = expected.parse()?;
    ensure!(*found == expected, "{found}\nis not\n{expected}");
    Ok(())
}
