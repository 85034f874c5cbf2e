package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"devlet.test/interop/kubernetes/cluster"
	"devlet.test/interop/node"
)

// plugin is the scripted device plugin as a process of the host.
type plugin struct {
	*cluster.Process
	m *machine
	// kind is the last part of the resource's name, and begins the device IDs.
	kind, resource string
	devices        int
	// files has its device files, its script and its calls.
	files string
	flags []string
}

// plugin starts the scripted plugin of a kind of devices, and waits until the node offers its devices.
func (t *T) plugin(kind string, devices int, flags ...string) *plugin {
	p := t.newPlugin(kind, devices, flags...)
	t.ok(p.Start())
	t.Must("the plugin of "+kind+" is registered", p.offered(devices))
	return p
}

// newPlugin returns a plugin that is not started.
func (t *T) newPlugin(kind string, devices int, flags ...string) *plugin {
	p := &plugin{
		m: t.m, kind: kind, resource: domain + kind, devices: devices,
		files: filepath.Join(t.m.dir, "files", kind), flags: flags,
	}
	t.ok(os.MkdirAll(p.files, 0o755))
	p.Process = p.process("v1")
	t.m.plugins = append(t.m.plugins, p)
	t.cleanup(p.Kill)
	return p
}

// process returns another process of the plugin, of some version.
func (p *plugin) process(version string) *cluster.Process {
	args := append([]string{
		"--dir=" + p.m.pluginDir(), "--resource=" + p.resource, fmt.Sprintf("--devices=%d", p.devices),
		"--files=" + p.files, "--version=" + version,
	}, p.flags...)
	process := cluster.NewProcess(filepath.Join(p.m.dir, "logs"), filepath.Join(*plugins, "plugin-scripted"), args...)
	process.Log = filepath.Join(p.m.dir, "logs", "plugin-"+p.kind+".log")
	return process
}

// script sets the faults, as in "Allocate hang".
func (p *plugin) script(lines ...string) {
	// It is replaced at once: the plugin may be reading it.
	if err := cluster.Replace(filepath.Join(p.files, "script"), []byte(strings.Join(lines, "\n"))); err != nil {
		panic(err)
	}
}

// call is a call that the plugin received.
type call struct {
	Call, Version string
	IDs           []string
	Time          time.Time
	PID           int
}

// calls returns all calls with a name.
func (p *plugin) calls(name string) []call {
	text, _ := os.ReadFile(filepath.Join(p.files, "calls"))
	var found []call
	for line := range bytes.Lines(text) {
		var c call
		if json.Unmarshal(line, &c) == nil && c.Call == name {
			found = append(found, c)
		}
	}
	return found
}

// called waits until the plugin has received a number of calls with a name.
func (p *plugin) called(name string, count int) error {
	return node.Until(soon, func() error {
		if got := len(p.calls(name)); got < count {
			return fmt.Errorf("the plugin received %s %d times, not %d", name, got, count)
		}
		return nil
	})
}

// offered waits until the node offers a number of the plugin's devices.
func (p *plugin) offered(count int) error {
	return p.m.offered(p.resource, count)
}

func (m *machine) offered(resource string, count int) error {
	_, err := m.cluster.Admin.Await(nodePath, soon, func(o Object) error {
		return equal("allocatable "+resource, o.Text("status", "allocatable", resource), count)
	})
	return err
}

// idleExcept waits until no container with a kind of devices runs but those of some pods.
func idleExcept(kind string, pods ...string) error {
	return node.Until(soon, func() error {
		var failed error
		for _, i := range instances() {
			if _, ok := i.requested()[kind]; ok && !slices.Contains(pods, i.env["POD"]) {
				failed = errors.Join(failed, fmt.Errorf("%v runs", i))
			}
		}
		return failed
	})
}

// ids returns the device IDs of a call.
func (c call) ids() []string { return slices.Sorted(slices.Values(c.IDs)) }

// pluginPod runs a plugin as a pod that mounts the directory of plugins, as a DaemonSet does.
func (t *T) pluginPod(p *plugin) {
	p.m.plugins = slices.DeleteFunc(p.m.plugins, func(other *plugin) bool { return other == p })
	name := "plugin-" + p.kind
	object := pod{name: name}.object()
	mount := func(name, path string) Object {
		return Object{"name": name, "hostPath": Object{"path": path, "type": "Directory"}}
	}
	spec := object["spec"].(Object)
	spec["volumes"] = []Object{mount("sockets", p.m.pluginDir()), mount("files", p.files)}
	container := spec["containers"].([]Object)[0]
	container["command"] = append([]string{
		"/bin/plugin", "--resource=" + p.resource, fmt.Sprintf("--devices=%d", p.devices),
		"--files=/files", "--host-files=" + p.files,
	}, p.flags...)
	container["volumeMounts"] = []Object{
		{"name": "sockets", "mountPath": kubeletDir + "/device-plugins"}, {"name": "files", "mountPath": "/files"},
	}
	_, err := t.m.cluster.Admin.Create(podsPath, object)
	t.ok(err)
	t.cleanup(func() { t.m.cluster.Admin.Delete(podPath(name), 0) })
}
