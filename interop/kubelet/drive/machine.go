package main

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"devlet.test/interop/kubernetes/cluster"
	"devlet.test/interop/node"
)

const (
	nodeName      = "node1"
	kubeletDir    = "/var/lib/kubelet"
	runtimeSocket = "/run/containerd/containerd.sock"
)

// machine is the node: containerd, kubelet, device plugins, and devlet if the
// node has the shield. Its /run and /var/lib/kubelet are those of the mount
// namespace that the harness runs in.
type machine struct {
	dir     string
	cluster *cluster.Cluster

	containerd, kubelet *cluster.Process

	// shield starts devlet before the kubelet; plugins then register with devlet.
	shield bool
	devlet *cluster.Process

	plugins []*plugin
}

// newMachine prepares a node whose processes do not run yet.
func newMachine(dir string, c *cluster.Cluster, shielded bool) (*machine, error) {
	m := &machine{dir: dir, cluster: c, shield: shielded}
	for _, made := range []string{"kubelet", "containerd", "devlet", "pods", "files", "logs", "cdi"} {
		if err := os.MkdirAll(filepath.Join(dir, made), 0o755); err != nil {
			return nil, err
		}
	}
	// The kubelet's directory of device plugins is a constant.
	if err := syscall.Mount(filepath.Join(dir, "kubelet"), kubeletDir, "", syscall.MS_BIND, ""); err != nil {
		return nil, fmt.Errorf("mount %s: %w", kubeletDir, err)
	}
	if err := syscall.Mount("", kubeletDir, "", syscall.MS_SHARED, ""); err != nil {
		return nil, fmt.Errorf("share %s: %w", kubeletDir, err)
	}
	if err := syscall.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return nil, fmt.Errorf("mount /run: %w", err)
	}
	if err := syscall.Mount(filepath.Join(dir, "cdi"), "/etc/cdi", "", syscall.MS_BIND, ""); err != nil {
		return nil, fmt.Errorf("mount /etc/cdi: %w", err)
	}
	bootID := filepath.Join(dir, "boot_id")
	if err := errors.Join(newBootID(bootID),
		syscall.Mount(bootID, "/proc/sys/kernel/random/boot_id", "", syscall.MS_BIND, "")); err != nil {
		return nil, fmt.Errorf("mount the boot ID: %w", err)
	}
	if err := makeCgroups(); err != nil {
		return nil, err
	}

	user, err := c.Node(nodeName, 0)
	if err != nil {
		return nil, err
	}
	kubeconfig, err := c.Kubeconfig(user)
	if err != nil {
		return nil, err
	}
	config, err := m.writeKubeletConfig()
	if err != nil {
		return nil, err
	}
	logs := filepath.Join(dir, "logs")
	m.kubelet = cluster.NewProcess(logs, filepath.Join(*programs, "kubelet"),
		"--config="+config, "--kubeconfig="+kubeconfig, "--hostname-override="+nodeName,
		"--cert-dir="+filepath.Join(dir, "pki"), "--v="+*verbosity)
	if err := m.writeContainerdConfig(true); err != nil {
		return nil, err
	}
	// The node is not ready without a network. Pods are on the host's.
	network := `{"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "none"}]}`
	if err := os.WriteFile(filepath.Join(dir, "none.conflist"), []byte(network), 0o600); err != nil {
		return nil, err
	}
	settings := filepath.Join(dir, "devlet.yaml")
	if err := os.WriteFile(settings, []byte("shield: {staticPodDir: "+filepath.Join(dir, "pods")+"}"), 0o600); err != nil {
		return nil, err
	}
	m.devlet = cluster.NewProcess(logs, *shield, "serve", "--shield", "--root-dir="+m.root(), "--config="+settings)
	m.devlet.Log = filepath.Join(logs, "devlet.log")
	m.containerd = cluster.NewProcess(logs, filepath.Join(*programs, "containerd"), "--config="+m.containerdFile())
	return m, nil
}

// writeContainerdConfig leaves CDI as it is by default: on, with /etc/cdi and /var/run/cdi. Or CDI is of no use: off, or
// with another directory in releases that have it on always.
func (m *machine) writeContainerdConfig(cdi bool) error {
	version := "version = 3\n"
	images, cri := "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"
	sandbox := "[plugins.'" + images + "'.pinned_images]\nsandbox = 'localhost/pause:1'\n"
	extra := ""
	if *oldContainerd {
		version, cri = "version = 2\n", "io.containerd.grpc.v1.cri"
		sandbox, extra = "", "sandbox_image = 'localhost/pause:1'\n"
		if cdi {
			extra += "enable_cdi = true\ncdi_spec_dirs = ['/etc/cdi', '/var/run/cdi']\n"
		}
	}
	if !cdi && !*oldContainerd {
		extra = "cdi_spec_dirs = ['/nowhere']\n"
	}
	config := version + "root = '" + filepath.Join(m.dir, "containerd") + "'\nstate = '/run/containerd'\n" +
		"[grpc]\naddress = '" + runtimeSocket + "'\n" + sandbox +
		"[plugins.'" + cri + "']\n" + extra +
		// The harness may not raise the priority of processes.
		"restrict_oom_score_adj = true\n" +
		"[plugins.'" + cri + "'.cni]\nconf_dir = '" + m.dir + "'\n"
	return os.WriteFile(m.containerdFile(), []byte(config), 0o600)
}

func (m *machine) containerdFile() string { return filepath.Join(m.dir, "containerd.toml") }

func (m *machine) writeKubeletConfig() (string, error) {
	config, err := json.Marshal(Object{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"address": "127.0.0.1", "healthzPort": 10248, "healthzBindAddress": "127.0.0.1",
		"failCgroupV1": false, "cgroupDriver": "cgroupfs", "cgroupRoot": "/" + *cgroup,
		"enforceNodeAllocatable": []string{}, "localStorageCapacityIsolation": false, "failSwapOn": false,
		"containerRuntimeEndpoint": "unix://" + runtimeSocket,
		"authentication": Object{
			"anonymous": Object{"enabled": false}, "webhook": Object{"enabled": false},
			"x509": Object{"clientCAFile": m.cluster.Authority.File},
		},
		"authorization":             Object{"mode": "AlwaysAllow"},
		"nodeStatusUpdateFrequency": "1s", "nodeStatusReportFrequency": "1s",
		// The disk of a developer is often full.
		"evictionHard":                Object{"memory.available": "50Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
		"imageGCHighThresholdPercent": 100,
		"podLogsDir":                  filepath.Join(m.dir, "pod-logs"), "staticPodPath": filepath.Join(m.dir, "pods"),
		"fileCheckFrequency": "1s", "maxPods": 250,
	})
	if err != nil {
		return "", err
	}
	path := filepath.Join(m.dir, "kubelet.yaml")
	return path, os.WriteFile(path, config, 0o600)
}

// start starts the node for the first time, and waits until it is ready.
func (m *machine) start() error {
	if err := m.startContainerd(); err != nil {
		return err
	}
	for name, contents := range map[string]map[string]string{
		"pause": {"bin/busybox": "/bin/busybox"},
		"tools": {"bin/busybox": "/bin/busybox", "bin/plugin": filepath.Join(*plugins, "plugin-scripted")},
	} {
		archive := filepath.Join(m.dir, name+".tar")
		err := writeImage(archive, "localhost/"+name+":1", contents,
			map[string]string{"bin/sh": "busybox", "bin/sleep": "busybox"}, "/bin/sleep", "1000000")
		if err != nil {
			return err
		}
		if err := m.ctr("images", "import", archive); err != nil {
			return err
		}
	}
	if err := m.startDevlet(); err != nil {
		return err
	}
	if err := m.kubelet.Start(); err != nil {
		return err
	}
	if err := m.ready(); err != nil {
		return errors.Join(err, m.kubelet.Running())
	}
	// The controller that would remove it is left out.
	_, err := m.cluster.Admin.Patch(nodePath, Object{"spec": Object{"taints": nil}})
	return err
}

// stop ends the node, and deletes its Node object.
func (m *machine) stop() {
	m.crash()
	m.cluster.Admin.Delete(nodePath, -1)
	for _, mounted := range []string{"/proc/sys/kernel/random/boot_id", "/run", "/etc/cdi", kubeletDir} {
		syscall.Unmount(mounted, syscall.MNT_DETACH)
	}
}

// ready waits until the kubelet has reported that it is ready since now.
func (m *machine) ready() error {
	// The times in the status are whole seconds.
	since := time.Now().Truncate(time.Second).Add(time.Second)
	return node.Until(late, func() error {
		// A kubelet ends if containerd answers its first call with an error. Its service would start it again.
		if m.kubelet.Running() != nil {
			if err := m.kubelet.Start(); err != nil {
				return err
			}
		}
		o, err := m.cluster.Admin.Get(nodePath)
		if err != nil {
			return err
		}
		for _, condition := range o.Objects("status", "conditions") {
			seen, _ := time.Parse(time.RFC3339, condition.Text("lastHeartbeatTime"))
			if condition.Text("type") == "Ready" && condition.Text("status") == "True" && !seen.Before(since) {
				return nil
			}
		}
		return fmt.Errorf("the node is not ready: %v", o.At("status", "conditions"))
	})
}

func (m *machine) ctr(args ...string) error {
	out, err := exec.Command(filepath.Join(*programs, "ctr"),
		append([]string{"--address", runtimeSocket, "--namespace", "k8s.io"}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ctr %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// startContainerd starts containerd, and waits until it has told systemd, if there were one, that it is ready.
func (m *machine) startContainerd() error {
	const ready = "containerd successfully booted"
	before, _ := os.ReadFile(m.containerd.Log)
	if err := m.containerd.Start(); err != nil {
		return err
	}
	return node.Until(soon, func() error {
		now, err := os.ReadFile(m.containerd.Log)
		if err == nil {
			err = contains(string(now[len(before):]), ready)
		}
		return errors.Join(m.containerd.Running(), err)
	})
}

// startDevlet starts devlet if the node has the shield, and waits until it answers.
func (m *machine) startDevlet() error {
	if !m.shield {
		return nil
	}
	if err := m.devlet.Start(); err != nil {
		return err
	}
	return node.Until(soon, func() error {
		_, err := m.ask("get", "pods")
		return errors.Join(m.devlet.Running(), err)
	})
}

// ask runs a command of devlet and returns its output.
func (m *machine) ask(args ...string) (string, error) {
	command := exec.Command(*shield, args...)
	command.Env = append(os.Environ(), "DEVLET_ROOT="+m.root())
	out, err := command.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("devlet %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

// root is the root directory of devlet.
func (m *machine) root() string { return filepath.Join(m.dir, "devlet") }

// pluginDir is the directory that the DaemonSets of plugins mount.
func (m *machine) pluginDir() string {
	if m.shield {
		return filepath.Join(m.root(), "device-plugins")
	}
	return filepath.Join(kubeletDir, "device-plugins")
}

// crash ends all processes of the node at once, as a power failure.
func (m *machine) crash() {
	m.kubelet.Kill()
	m.containerd.Kill()
	m.devlet.Kill()
	for _, p := range m.plugins {
		p.Kill()
	}
	m.plugins = nil
	// Shims start again what was killed before them.
	for range 5 {
		left := 0
		for _, process := range processes() {
			if process.container != "" || process.name == "containerd-shim" {
				syscall.Kill(process.pid, syscall.SIGKILL)
				left++
			}
		}
		if left == 0 {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	for _, mounted := range mounts() {
		if strings.HasPrefix(mounted, "/run/") || strings.HasPrefix(mounted, kubeletDir+"/") {
			syscall.Unmount(mounted, syscall.MNT_DETACH)
		}
	}
}

// reboot is a power failure and a boot: processes, /run, mounts and cgroups are
// gone, files on disk stay, and the boot ID is another one. It returns once the
// kubelet is started.
func (m *machine) reboot() error {
	m.crash()
	entries, err := os.ReadDir("/run")
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if err := os.RemoveAll(filepath.Join("/run", entry.Name())); err != nil {
			return err
		}
	}
	if err := errors.Join(removeCgroups(), makeCgroups(), newBootID(filepath.Join(m.dir, "boot_id"))); err != nil {
		return err
	}
	if err := errors.Join(m.startContainerd(), m.startDevlet()); err != nil {
		return err
	}
	return m.kubelet.Start()
}

// restartKubelet waits until the kubelet serves device plugins again.
func (m *machine) restartKubelet() error {
	before := time.Now()
	if err := m.kubelet.Start(); err != nil {
		return err
	}
	return node.Until(soon, func() error {
		info, err := os.Stat(filepath.Join(kubeletDir, "device-plugins", "kubelet.sock"))
		if err == nil && info.ModTime().Before(before) {
			err = errors.New("kubelet.sock is that of the last kubelet")
		}
		return errors.Join(err, m.kubelet.Running())
	})
}

func newBootID(path string) error {
	id := make([]byte, 16)
	rand.Read(id)
	// In place: the file is mounted.
	text := fmt.Sprintf("%x-%x-%x-%x-%x\n", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
	return os.WriteFile(path, []byte(text), 0o644)
}

// hierarchies returns the cgroup hierarchies: one, or one for each controller of version 1.
func hierarchies() ([]string, error) {
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		return []string{"/sys/fs/cgroup"}, nil
	}
	return filepath.Glob("/sys/fs/cgroup/*")
}

func makeCgroups() error {
	all, err := hierarchies()
	for _, hierarchy := range all {
		err = errors.Join(err, os.MkdirAll(filepath.Join(hierarchy, *cgroup), 0o755))
	}
	return err
}

// removeCgroups removes all cgroups of the node, whose processes may still be ending.
func removeCgroups() error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	return node.Until(soon, func() error {
		var failed error
		for _, hierarchy := range all {
			var dirs []string
			filepath.WalkDir(filepath.Join(hierarchy, *cgroup), func(path string, entry os.DirEntry, err error) error {
				if err == nil && entry.IsDir() {
					dirs = append(dirs, path)
				}
				return nil
			})
			slices.Reverse(dirs)
			for _, dir := range dirs {
				if err := syscall.Rmdir(dir); err != nil && err != syscall.ENOENT {
					failed = fmt.Errorf("rmdir %s: %w", dir, err)
				}
			}
		}
		return failed
	})
}

// mounts returns the mount points of the namespace, the last one first.
func mounts() []string {
	text, _ := os.ReadFile("/proc/self/mountinfo")
	var found []string
	for line := range bytes.Lines(text) {
		if fields := strings.Fields(string(line)); len(fields) > 4 {
			found = append(found, fields[4])
		}
	}
	slices.Reverse(found)
	return found
}
