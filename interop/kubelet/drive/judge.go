package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// process is a process of the node.
type process struct {
	pid  int
	name string
	// pod and container are the UID and ID in the name of its cgroup, or "".
	pod, container string
}

var podCgroup = regexp.MustCompile(`/pod([0-9a-f-]{32,36})/([0-9a-f]{64})`)

// processes returns all processes of the namespace.
func processes() []process {
	entries, _ := os.ReadDir("/proc")
	var found []process
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		name, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "comm"))
		if err != nil {
			continue
		}
		p := process{pid: pid, name: strings.TrimSpace(string(name))}
		cgroups, _ := os.ReadFile(filepath.Join("/proc", entry.Name(), "cgroup"))
		if match := podCgroup.FindSubmatch(cgroups); match != nil {
			p.pod, p.container = string(match[1]), string(match[2])
		}
		found = append(found, p)
	}
	return found
}

// instance is a running container of a test's pod that has opened its devices.
type instance struct {
	process
	// env is that of its process. POD, CONTAINER and WANTS are set by the pod.
	env map[string]string
	// open are the device files that it holds open: thing-0.
	open []string
}

func (i instance) String() string {
	return fmt.Sprintf("%s/%s (container %.8s, pid %d)", i.env["POD"], i.env["CONTAINER"], i.container, i.pid)
}

// instances returns the containers that are running now. Containers that did
// not get to opening their devices yet are left out.
func instances() []instance {
	var found []instance
	for _, p := range processes() {
		if p.container == "" || p.name != "sleep" {
			continue
		}
		if i, ok := inspect(p); ok {
			found = append(found, i)
		}
	}
	return found
}

func inspect(p process) (instance, bool) {
	i := instance{process: p, env: map[string]string{}}
	dir := filepath.Join("/proc", strconv.Itoa(p.pid))
	environ, err := os.ReadFile(filepath.Join(dir, "environ"))
	if err != nil {
		return i, false
	}
	for part := range bytes.SplitSeq(environ, []byte{0}) {
		if name, value, ok := strings.Cut(string(part), "="); ok {
			i.env[name] = value
		}
	}
	if i.env["POD"] == "" {
		return i, false
	}
	descriptors, err := os.ReadDir(filepath.Join(dir, "fd"))
	// A process that ends has no descriptors.
	if err != nil || len(descriptors) == 0 {
		return i, false
	}
	for _, descriptor := range descriptors {
		target, _ := os.Readlink(filepath.Join(dir, "fd", descriptor.Name()))
		device := filepath.Base(target)
		if i.wants(device) && !slices.Contains(i.open, device) {
			i.open = append(i.open, device)
		}
	}
	slices.Sort(i.open)
	return i, true
}

// requested returns the number of devices by kind: WANTS is "thing=2,gpu=1".
func (i instance) requested() map[string]int {
	counts := map[string]int{}
	for want := range strings.SplitSeq(i.env["WANTS"], ",") {
		if kind, number, ok := strings.Cut(want, "="); ok {
			counts[kind], _ = strconv.Atoi(number)
		}
	}
	return counts
}

func (i instance) wants(device string) bool {
	for kind := range i.requested() {
		if strings.HasPrefix(device, kind+"-") {
			return true
		}
	}
	return false
}

// complete returns an error unless the container holds open all devices that its pod requests.
func (i instance) complete() error {
	total := 0
	for _, count := range i.requested() {
		total += count
	}
	if len(i.open) != total {
		return fmt.Errorf("%v has %v open, and requests %s", i, i.open, i.env["WANTS"])
	}
	return nil
}

// violations returns what must never be: a device that two containers hold
// open, and a container without a device of its pod. A reading is not atomic,
// so each violation is read a second time.
func violations() []string {
	var found []string
	holders := map[string]instance{}
	for _, now := range instances() {
		if now.complete() != nil {
			time.Sleep(20 * time.Millisecond)
			if again, ok := inspect(now.process); ok && again.complete() != nil {
				found = append(found, again.complete().Error())
			}
		}
		for _, device := range now.open {
			other, taken := holders[device]
			if taken && other.container != now.container {
				// It was read before, and both still have the device.
				if again, ok := inspect(other.process); ok && slices.Contains(again.open, device) {
					found = append(found, fmt.Sprintf("%s is open in %v and %v", device, other, now))
				}
			}
			holders[device] = now
		}
	}
	return found
}

// watch reads violations until it is stopped, and returns them.
func watch() (stop func() []string) {
	end, ended := make(chan struct{}), make(chan []string)
	go func() {
		var found []string
		for {
			for _, violation := range violations() {
				if !slices.Contains(found, violation) {
					found = append(found, violation)
				}
			}
			select {
			case <-end:
				ended <- found
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	}()
	return func() []string { close(end); return <-ended }
}
