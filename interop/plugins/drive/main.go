// Command drive starts devlet and unmodified device plugins, admits pods, and
// restarts devlet while the plugins run. It requires its own mount namespace and
// root rights; ../run provides both.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"time"

	"devlet.test/interop/node"
)

// The path is a constant in the plugins.
const root = "/var/lib/kubelet"

// plugin is an unmodified device plugin.
type plugin struct {
	name string
	// command starts it, in a shell with its own mounts.
	command string
	// capacity is the number of devices by resource.
	capacity map[string]int
	// limits are those of the pod; a second pod can get as many devices.
	limits []string
	// check checks the changes to the pod's container.
	check func(node.Container) error
}

var plugins = []plugin{
	{
		name: "squat generic-device-plugin",
		command: `exec "$BIN/plugin-generic" --listen 127.0.0.1:0 ` +
			`--device '{"name":"harmless","groups":[{"count":4,"paths":[` +
			`{"path":"/dev/null","mountPath":"/dev/harmless","permissions":"rw"},` +
			`{"path":"/etc/passwd","mountPath":"/etc/names","type":"Mount","readOnly":true}]}]}' ` +
			`--device '{"name":"zero","groups":[{"count":2,"paths":[{"path":"/dev/zero"}]}]}'`,
		capacity: map[string]int{"squat.ai/harmless": 4, "squat.ai/zero": 2},
		limits:   []string{"squat.ai/harmless=2", "squat.ai/zero=1"},
		check: func(c node.Container) error {
			return errors.Join(
				same("device nodes", byPath(c.DeviceNodes), []node.DeviceNode{
					{ContainerPath: "/dev/harmless", HostPath: "/dev/null", Permissions: "rw"},
					{ContainerPath: "/dev/zero", HostPath: "/dev/zero", Permissions: "mrw"},
				}),
				same("mounts", c.Mounts, []node.Mount{
					{ContainerPath: "/etc/names", HostPath: "/etc/passwd", ReadOnly: true},
				}),
			)
		},
	},
	{
		name:     "kubernetes sample-device-plugin",
		command:  `mount -t tmpfs tmpfs /tmp && CDI_ENABLED= exec "$BIN/plugin-sample"`,
		capacity: map[string]int{"example.com/resource": 2},
		limits:   []string{"example.com/resource=1"},
		check: func(c node.Container) error {
			file := "/tmp/" + c.Devices[0].IDs[0]
			return same("mounts", c.Mounts, []node.Mount{{ContainerPath: file, HostPath: file}})
		},
	},
	{
		// It only checks that the two devices exist.
		name: "intel sgx_plugin",
		command: `mount -t tmpfs tmpfs /dev && touch /dev/sgx_enclave /dev/sgx_provision && ` +
			`exec "$BIN/plugin-sgx" -enclave-limit 300 -provision-limit 3`,
		capacity: map[string]int{"sgx.intel.com/enclave": 300, "sgx.intel.com/provision": 3},
		limits:   []string{"sgx.intel.com/enclave=1", "sgx.intel.com/provision=1"},
		check: func(c node.Container) error {
			return same("device nodes", byPath(c.DeviceNodes), []node.DeviceNode{
				{ContainerPath: "/dev/sgx_enclave", HostPath: "/dev/sgx_enclave", Permissions: "rw"},
				{ContainerPath: "/dev/sgx_provision", HostPath: "/dev/sgx_provision", Permissions: "rw"},
			})
		},
	},
}

func main() {
	binary := filepath.Join(os.Getenv("BIN"), "devlet")
	var results node.Results
	n, err := node.Start(binary, root)
	if !results.Check("devlet starts", err) {
		results.End()
	}

	running := make([]*process, len(plugins))
	for i, p := range plugins {
		running[i], err = start(p.command)
		if err != nil {
			results.Check(p.name+" starts", err)
		}
	}
	pods := make([]node.Pod, len(plugins))
	for i, p := range plugins {
		results.Check(p.name+" registers", running[i].explain(offered(n, p)))
		pods[i], err = admit(n, p, pod(i, "first"))
		results.Check(p.name+" serves a pod", running[i].explain(err))
	}

	results.Check("devlet stops", n.Stop())
	if n, err = node.Start(binary, root); !results.Check("devlet starts again", err) {
		results.End()
	}
	for i, p := range plugins {
		results.Check(p.name+" registers again", running[i].explain(offered(n, p)))
		results.Check(p.name+" still has its pod", again(n, p, pod(i, "first"), pods[i]))
		second, err := admit(n, p, pod(i, "second"))
		if err == nil {
			err = disjoint(pods[i], second)
		}
		results.Check(p.name+" serves another pod", running[i].explain(err))
	}
	for i, p := range plugins {
		results.Check(p.name+" gets its devices back", removed(n, p, pod(i, "first"), pod(i, "second")))
		running[i].stop()
		results.Check(p.name+" leaves", left(n, p))
	}
	results.Check("devlet stops again", n.Stop())
	results.End()
}

func pod(plugin int, which string) string { return fmt.Sprintf("%s-%d", which, plugin) }

// offered waits until a plugin's devices are listed.
func offered(n *node.Node, p plugin) error {
	return node.Until(30*time.Second, func() error {
		for name, count := range p.capacity {
			r, err := n.Resource(name)
			if err != nil {
				return err
			}
			if r.Capacity != count || r.Allocatable != count {
				return fmt.Errorf("%s: capacity %d, allocatable %d of %d", name, r.Capacity, r.Allocatable, count)
			}
		}
		return nil
	})
}

func admit(n *node.Node, p plugin, name string) (node.Pod, error) {
	pod, err := n.Admit(name, p.limits...)
	if err != nil {
		return pod, err
	}
	var got []string
	for _, d := range pod.Containers[0].Devices {
		got = append(got, fmt.Sprintf("%s=%d", d.Resource, len(d.IDs)))
	}
	slices.Sort(got)
	if err := same("devices", got, p.limits); err != nil {
		return pod, err
	}
	return pod, p.check(pod.Containers[0])
}

// again checks that a pod still has its devices.
func again(n *node.Node, p plugin, name string, before node.Pod) error {
	after, err := admit(n, p, name)
	if err != nil {
		return err
	}
	return same("pod", after, before)
}

func disjoint(a, b node.Pod) error {
	for _, x := range a.Containers[0].Devices {
		for _, y := range b.Containers[0].Devices {
			for _, id := range x.IDs {
				if x.Resource == y.Resource && slices.Contains(y.IDs, id) {
					return fmt.Errorf("both pods have %s of %s", id, x.Resource)
				}
			}
		}
	}
	return nil
}

func removed(n *node.Node, p plugin, names ...string) error {
	for _, name := range names {
		if _, err := n.Run("remove", name); err != nil {
			return err
		}
	}
	for name, count := range p.capacity {
		if r, err := n.Resource(name); err != nil || r.Held != 0 || r.Free != count {
			return fmt.Errorf("%s: %d held, %d free of %d (%v)", name, r.Held, r.Free, count, err)
		}
	}
	return nil
}

// left waits until the devices of a stopped plugin are not allocatable.
func left(n *node.Node, p plugin) error {
	return node.Until(10*time.Second, func() error {
		for name := range p.capacity {
			if r, err := n.Resource(name); err != nil || r.Allocatable != 0 {
				return fmt.Errorf("%s: allocatable %d (%v)", name, r.Allocatable, err)
			}
		}
		return nil
	})
}

func same(what string, got, want any) error {
	if !reflect.DeepEqual(got, want) {
		return fmt.Errorf("%s are %+v, not %+v", what, got, want)
	}
	return nil
}

func byPath(nodes []node.DeviceNode) []node.DeviceNode {
	slices.SortFunc(nodes, func(a, b node.DeviceNode) int {
		return strings.Compare(a.ContainerPath, b.ContainerPath)
	})
	return nodes
}

// process is a running plugin.
type process struct {
	cmd *exec.Cmd
	log node.Log
}

func start(command string) (*process, error) {
	p := &process{cmd: exec.Command("unshare", "--mount", "sh", "-c", command)}
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return p, p.cmd.Start()
}

func (p *process) stop() {
	p.cmd.Process.Signal(syscall.SIGTERM)
	kill := time.AfterFunc(10*time.Second, func() { p.cmd.Process.Kill() })
	defer kill.Stop()
	p.cmd.Wait()
}

// explain adds the plugin's output to an error.
func (p *process) explain(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%w; output of the plugin:\n%s", err, &p.log)
}
