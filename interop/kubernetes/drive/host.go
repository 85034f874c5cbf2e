package main

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"devlet.test/interop/kubernetes/cluster"
	"devlet.test/interop/node"
)

// Deadlines, sized for a busy machine with two cores.
const (
	soon = 30 * time.Second
	late = 90 * time.Second
)

// host is a node: its object in the API, a root directory, and devlet.
type host struct {
	t          *T
	name, root string
	// binary is devlet, or a script that runs it.
	binary     string
	user       cluster.User
	kubeconfig string
	// api has the rights of the node.
	api *cluster.Client

	*node.Node
	flags []string
}

// hosts is the number of hosts so far.
var hosts atomic.Int32

// host creates a node with the scenario's name. devlet does not run yet.
func (t *T) host() *host { return t.hostNamed(t.name) }

func (t *T) hostNamed(name string) *host {
	// Short, because paths of sockets are limited to 107 bytes.
	root := filepath.Join(filepath.Dir(t.dir), fmt.Sprintf("n%d", hosts.Add(1)))
	h := &host{t: t, name: name, root: root, binary: *devlet}
	t.ok(os.MkdirAll(h.root, 0o755))
	h.createObject()
	var err error
	h.user, err = t.Node(name, 0)
	t.ok(err)
	h.kubeconfig, err = t.Kubeconfig(h.user)
	t.ok(err)
	h.api, err = t.Client(h.user)
	t.ok(err)
	t.cleanup(func() {
		if h.Node != nil {
			h.Kill()
			t.write(name+"-devlet.log", []byte(h.Log()))
		}
		t.Admin.Delete(nodePath(name), -1)
	})
	return h
}

// createObject creates the Node object, ready and without taints.
func (h *host) createObject() Object {
	created, err := h.t.Admin.Create("/api/v1/nodes", Object{
		"metadata": Object{"name": h.name, "labels": Object{"kubernetes.io/hostname": h.name}},
	})
	h.t.ok(err)
	room := Object{"cpu": "64", "memory": "64Gi", "pods": "20k"}
	now := time.Now().UTC().Format(time.RFC3339)
	_, err = h.t.Admin.Patch(nodePath(h.name)+"/status", Object{"status": Object{
		"capacity": room, "allocatable": room,
		"conditions": []any{Object{
			"type": "Ready", "status": "True", "reason": "Test", "message": "set by the test",
			"lastHeartbeatTime": now, "lastTransitionTime": now,
		}},
	}})
	h.t.ok(err)
	// The API server adds not-ready to every new node.
	_, err = h.t.Admin.Patch(nodePath(h.name), Object{"spec": Object{"taints": nil}})
	h.t.ok(err)
	return created
}

// object returns the Node object.
func (h *host) object() Object {
	object, err := h.t.Admin.Get(nodePath(h.name))
	h.t.ok(err)
	return object
}

// start starts devlet with flags of serve, which restart uses again.
func (h *host) start(flags ...string) {
	h.flags = flags
	started, err := node.Start(h.binary, h.root, flags...)
	h.t.Must("devlet starts", err)
	h.Node = started
}

// restart starts devlet again after Kill or Stop.
func (h *host) restart() error {
	started, err := node.Start(h.binary, h.root, h.flags...)
	if err == nil {
		h.Node = started
	}
	return err
}

// exampleDriver starts dra-example-driver with a number of devices.
func (h *host) exampleDriver(name string, devices int, flags ...string) *cluster.Process {
	driver := cluster.NewProcess(h.t.dir, filepath.Join(*programs, "dra-example-kubeletplugin"), append([]string{
		"--node-name=" + h.name, "--kubeconfig=" + h.kubeconfig, "--driver-name=" + name,
		fmt.Sprintf("--num-devices=%d", devices), "--cdi-root=" + h.cdi(),
		"--kubelet-registrar-directory-path=" + filepath.Join(h.root, "plugins_registry"),
		"--kubelet-plugins-directory-path=" + filepath.Join(h.root, "plugins"),
	}, flags...)...)
	h.t.ok(driver.Start())
	h.t.cleanup(driver.Kill)
	return driver
}

// publish publishes a ResourceSlice as a driver on this node does.
func (h *host) publish(driver string, devices ...string) {
	list := []any{}
	for _, device := range devices {
		list = append(list, Object{"name": device})
	}
	node := h.object()
	_, err := h.api.Create(sliceCollection, Object{
		"metadata": Object{
			"generateName": h.name + "-",
			"ownerReferences": []any{Object{
				"apiVersion": "v1", "kind": "Node", "name": h.name, "uid": node.UID(), "controller": true,
			}},
		},
		"spec": Object{
			"driver": driver, "nodeName": h.name, "devices": list,
			"pool": Object{"name": h.name, "generation": 1, "resourceSliceCount": 1},
		},
	})
	h.t.ok(err)
}

// cdi returns the directory of CDI specs.
func (h *host) cdi() string { return filepath.Join(h.root, "cdi") }

// slices returns the ResourceSlices of a driver on this node.
func (h *host) slices(driver string) ([]Object, error) {
	slices, _, err := h.t.Admin.List(sliceCollection, h.sliceQuery(driver))
	return slices, err
}

// awaitSlices waits until the slices of a driver have a number of devices.
func (h *host) awaitSlices(driver string, devices int, timeout time.Duration) error {
	return h.t.Admin.AwaitList(sliceCollection, h.sliceQuery(driver), timeout, func(slices []Object) error {
		count := 0
		for _, slice := range slices {
			count += len(slice.Objects("spec", "devices"))
		}
		return equal("published devices", count, devices)
	})
}

func (h *host) sliceQuery(driver string) url.Values {
	return url.Values{"fieldSelector": {"spec.nodeName=" + h.name + ",spec.driver=" + driver}}
}

const sliceCollection = "/apis/resource.k8s.io/v1/resourceslices"

func nodePath(name string) string { return "/api/v1/nodes/" + name }

// path returns the path of an object of the scenario's namespace, or of a
// collection if there is no name.
func (t *T) path(kind string, name ...string) string {
	prefix := "/api/v1"
	if kind == "resourceclaims" || kind == "resourceclaimtemplates" {
		prefix = "/apis/resource.k8s.io/v1"
	}
	path := prefix + "/namespaces/" + t.name + "/" + kind
	for _, part := range name {
		path += "/" + part
	}
	return path
}

// pause stops devlet from running until resume.
func pause(h *host) { syscall.Kill(h.PID(), syscall.SIGSTOP) }

func resume(h *host) { syscall.Kill(h.PID(), syscall.SIGCONT) }
