package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// manifests tests packaging/kubernetes with an API server, kubectl and Helm. drive runs in the root of the repository.
var manifests = []scenario{
	{name: "manifests", run: manifestsAndChart},
	{name: "shield-patches", run: shieldPatches},
}

const packaging, chart = "packaging/kubernetes", "packaging/kubernetes/chart"

// valueSets are values of the chart, and the ClusterRoles that it binds with them.
var valueSets = []struct {
	name, values string
	roles        []string
}{
	{"default values", `{}`, []string{"devlet-beside-kubelet", "devlet-observe"}},
	{"no kubelet", `config: {kubernetes: {besideKubelet: false}}`,
		[]string{"devlet-agent", "devlet-beside-kubelet", "devlet-observe"}},
	{"the mode observe", `config: {kubernetes: {mode: observe, besideKubelet: false}}`, []string{"devlet-observe"}},
	{"another image and other nodes", `
image: registry.example.com/devlet:0.1.0@sha256:0000000000000000000000000000000000000000000000000000000000000000
nodeSelector: {acme.com/gpu: "true"}
tolerations: []
resources: {limits: {memory: 256Mi}, requests: null}
`, []string{"devlet-beside-kubelet", "devlet-observe"}},
	{"another configuration", `
config:
  http: "[::]:9000"
  rootDir: /srv/devlet
  logLevel: debug
  access: {register: [{resource: acme.com/*, uids: [1001]}]}
  kubernetes: {abandonAfter: {gpu.acme.com: 10m}, onUnhealthy: {acme.com/gpu: delete}}
`, []string{"devlet-beside-kubelet", "devlet-observe"}},
}

func manifestsAndChart(t *T) {
	namespace, err := os.ReadFile(packaging + "/namespace.yaml")
	t.ok(err)
	t.ok(t.Apply(string(namespace)))
	t.cleanup(func() { t.Admin.Delete("/api/v1/namespaces/"+accountNamespace, -1) })
	rendered, err := t.Kubectl("", "kustomize", packaging)
	t.ok(err)
	plain, err := t.dryRun("-k", packaging)
	t.Must("the API server accepts the manifests", err)
	// The check itself.
	for _, wrong := range [][2]string{{"hostPID:", "hostPid:"}, {"maxSurge: 0", "maxSurge: 1"}} {
		path := t.write("wrong.yaml", []byte(strings.Replace(string(rendered), wrong[0], wrong[1], 1)))
		_, err := t.dryRun("-f", path)
		t.Check("it refuses "+wrong[1], refused(err, strings.TrimSuffix(strings.Fields(wrong[1])[0], ":")))
	}

	for _, set := range valueSets {
		objects, err := t.chart(set.values)
		t.Check("the API server accepts the chart with "+set.name, err)
		if err == nil {
			t.Check("its roles", equal("roles", names(objects, "ClusterRoleBinding"), set.roles))
			t.Check("devlet accepts its configuration", t.checkConfig(objects))
		}
		if set.values == "{}" {
			t.Check("it equals the manifests", equalObjects(objects, plain))
		}
	}
	_, err = t.helm("install", "devlet", chart, "--namespace", accountNamespace)
	t.Must("Helm installs it", err)
	_, err = t.helm("upgrade", "devlet", chart, "--namespace", accountNamespace, "--set", "config.kubernetes.mode=observe")
	t.Check("Helm changes it", err)
	const roles = "/apis/rbac.authorization.k8s.io/v1/clusterroles/"
	_, err = t.Admin.Get(roles + "devlet-beside-kubelet")
	t.Check("with the mode observe, it has no right to write", refused(err, "404"))
	_, err = t.helm("uninstall", "devlet", "--namespace", accountNamespace)
	t.Check("Helm removes it", err)
	_, err = t.Admin.Get(roles + "devlet-observe")
	t.Check("and its roles", refused(err, "404"))
}

// dryRun has the API server check manifests, and returns their objects, without the Namespace.
func (t *T) dryRun(flags ...string) ([]Object, error) {
	out, err := t.Kubectl("", append([]string{"apply", "--dry-run=server", "--validate=strict", "-o", "json"}, flags...)...)
	if err != nil {
		return nil, err
	}
	var list Object
	if err := json.Unmarshal(out, &list); err != nil {
		return nil, err
	}
	objects := []Object{list}
	if list.Text("kind") == "List" {
		objects = list.Objects("items")
	}
	return slices.DeleteFunc(objects, func(o Object) bool { return o.Text("kind") == "Namespace" }), nil
}

// chart has Helm and the API server check the chart with values, and returns its objects.
func (t *T) chart(values string) ([]Object, error) {
	flags := []string{"devlet", chart, "--namespace", accountNamespace, "--values", t.write("values.yaml", []byte(values))}
	if _, err := t.helm("lint", flags[1:]...); err != nil {
		return nil, err
	}
	if _, err := t.helm("install", append(flags, "--dry-run=server")...); err != nil {
		return nil, err
	}
	rendered, err := t.helm("template", flags...)
	if err != nil {
		return nil, err
	}
	return t.dryRun("-f", t.write("chart.yaml", rendered))
}

// checkConfig has devlet check the configuration in a ConfigMap, and compares its port with that of the container.
func (t *T) checkConfig(objects []Object) error {
	config, port := "", any(nil)
	for _, o := range objects {
		config += o.Text("data", "devlet.yaml")
		for _, container := range o.Objects("spec", "template", "spec", "containers") {
			port = container.Objects("ports")[0].At("containerPort")
		}
	}
	path := t.write("chart-config.yaml", []byte(config))
	out, err := exec.Command(*devlet, "config", "print", "--plain", "--config", path).CombinedOutput()
	if err == nil && !strings.Contains(string(out), fmt.Sprintf(":%v", port)) {
		err = fmt.Errorf("it does not use port %v", port)
	}
	return wrap(err, "%s", out)
}

// names returns the sorted names of objects of a kind.
func names(objects []Object, kind string) []string {
	var found []string
	for _, o := range objects {
		if o.Text("kind") == kind {
			found = append(found, o.Name())
		}
	}
	slices.Sort(found)
	return found
}

// equalObjects compares objects without the metadata that the API server adds.
func equalObjects(got, want []Object) error {
	texts := func(objects []Object) []string {
		var all []string
		for _, o := range objects {
			metadata := o.Object("metadata")
			for _, key := range []string{"annotations", "creationTimestamp", "generation", "resourceVersion", "uid"} {
				delete(metadata, key)
			}
			text, _ := json.Marshal(o)
			all = append(all, string(text))
		}
		slices.Sort(all)
		return all
	}
	return equal("objects", strings.Join(texts(got), "\n"), strings.Join(texts(want), "\n"))
}

// helm runs Helm as admin and returns its output. It finds kubectl.
func (t *T) helm(command string, args ...string) ([]byte, error) {
	run := exec.Command(filepath.Join(t.Bin, "helm"), append([]string{command}, args...)...)
	home := filepath.Join(t.dir, "helm")
	run.Env = append(os.Environ(), "KUBECONFIG="+t.AdminConfig, "PATH="+t.Bin+":"+os.Getenv("PATH"),
		"HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	out, err := run.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("helm %s: %w: %s%s", command, err, exit.Stderr, out)
	}
	return out, err
}

// The host path of the directory in which device plugins register, with a kubelet and with the shield.
const kubeletPath, shieldPath = "/var/lib/kubelet/device-plugins", "/var/lib/devlet/device-plugins"

// shieldPatches applies the patches of packaging/kubernetes/shield to manifests and a chart of the plugins' projects.
func shieldPatches(t *T) {
	const shield = packaging + "/shield"
	t.ok(os.CopyFS(filepath.Join(t.dir, "shield"), os.DirFS(shield)))
	manifests := map[string]string{
		"generic-device-plugin": t.module("interop/plugins/generic", "github.com/squat/generic-device-plugin") +
			"/manifests/generic-device-plugin.yaml",
		"intel-gpu-plugin": t.module("interop/plugins/intel", "github.com/intel/intel-device-plugins-for-kubernetes") +
			"/deployments/gpu_plugin/base/intel-gpu-plugin.yaml",
	}
	nvidia := t.module("interop/plugins", "github.com/NVIDIA/k8s-device-plugin@v0.19.0") + "/deployments"
	manifests["nvidia-device-plugin-daemonset"] = nvidia + "/static/nvidia-device-plugin.yml"
	for name, manifest := range manifests {
		text, err := os.ReadFile(manifest)
		t.ok(err)
		t.write("plugin.yaml", text)
		t.write("kustomization.yaml", []byte("resources: [plugin.yaml]\ncomponents: [shield]\n"))
		objects, err := t.dryRun("-k", t.dir)
		t.Check("kustomize patches "+name, errors.Join(err, pluginPaths(objects, name)))
	}

	_, err := t.helm("plugin", "install", shield)
	t.Must("Helm installs the post-renderer", err)
	flags := []string{"nvdp", nvidia + "/helm/nvidia-device-plugin", "--namespace", t.name, "--set", "gfd.enabled=true",
		"--post-renderer", "devlet-shield"}
	_, err = t.helm("install", append(flags, "--dry-run=server")...)
	t.Check("the API server accepts the chart of NVIDIA with it", err)
	rendered, err := t.helm("template", flags...)
	t.ok(err)
	objects, err := t.dryRun("--namespace", t.name, "-f", t.write("nvidia.yaml", rendered))
	t.Check("only the plugin is patched", errors.Join(err, pluginPaths(objects, "nvdp-nvidia-device-plugin")))
	t.patchByHand(nvidia + "/static/nvidia-device-plugin.yml")
}

// patchByHand patches a DaemonSet that exists.
func (t *T) patchByHand(manifest string) {
	text, err := os.ReadFile(manifest)
	t.ok(err)
	t.ok(t.Apply(string(text)))
	const name = "nvidia-device-plugin-daemonset"
	defer t.Kubectl("", "delete", "daemonset", name, "-n", "kube-system")
	_, err = t.Kubectl("", "patch", "daemonset", name, "-n", "kube-system", "-p", fmt.Sprintf(
		`{"spec":{"template":{"spec":{"volumes":[{"name":"kubelet-device-plugins-dir","hostPath":{"path":%q}}]}}}}`, shieldPath))
	object, failed := t.Admin.Get("/apis/apps/v1/namespaces/kube-system/daemonsets/" + name)
	t.Check("kubectl patches a plugin", errors.Join(err, failed, pluginPaths([]Object{object}, name)))
}

// pluginPaths returns an error unless the DaemonSet of a plugin has devlet's directory where the plugin expects that of the
// kubelet, and no other object has it.
func pluginPaths(objects []Object, plugin string) error {
	mounts := 0
	for _, o := range objects {
		isPlugin := o.Text("kind") == "DaemonSet" && o.Name() == plugin
		volumes := map[string]string{}
		for _, v := range o.Objects("spec", "template", "spec", "volumes") {
			volumes[v.Text("name")] = v.Text("hostPath", "path")
			if path := v.Text("hostPath", "path"); path == shieldPath && !isPlugin {
				return fmt.Errorf("%s has %s", o.Name(), path)
			}
		}
		for _, container := range o.Objects("spec", "template", "spec", "containers") {
			for _, mount := range container.Objects("volumeMounts") {
				if isPlugin && mount.Text("mountPath") == kubeletPath {
					mounts++
					if path := volumes[mount.Text("name")]; path != shieldPath {
						return fmt.Errorf("%s mounts %s", o.Name(), path)
					}
				}
			}
		}
	}
	return equal("mounts of the plugin", mounts, 1)
}

// module returns the directory of a Go module's source. Its version is that of go.mod in a directory, unless it has one.
func (t *T) module(dir, module string) string {
	download := exec.Command("go", "mod", "download", "-json", module)
	download.Dir = dir
	download.Env = append(os.Environ(), "GOWORK=off")
	out, err := download.Output()
	var answer struct{ Dir, Error string }
	err = errors.Join(err, json.Unmarshal(out, &answer))
	t.ok(wrap(err, "%s: %s", module, answer.Error))
	return answer.Dir
}
