// Command drive tests device plugins on a node with a real kubelet and a real
// containerd. ../README.md describes its flags.
package main

import (
	"flag"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"devlet.test/interop/kubernetes/cluster"
	"devlet.test/interop/node"
)

// scenario is a named test. It runs on a bare node, on a node with the shield, or on both.
type scenario struct {
	name         string
	run          func(*T)
	bare, shield bool
	// moves: devlet comes to a bare node.
	moves bool
	// slow scenarios run only if --run names them.
	slow bool
}

func (s scenario) title(shield bool) string {
	if shield {
		return "shield/" + s.name
	}
	return "bare/" + s.name
}

var scenarios = slices.Concat(compared, moves, shielded, lost, faultRuns)

var (
	work          = flag.String("work", "", "an empty directory with a short path, for all files")
	cgroup        = flag.String("cgroup", "", "the name of the cgroup for the pods")
	controlPlane  = flag.String("control-plane", "", "the directory that ../kubernetes/build prints")
	programs      = flag.String("programs", "", "the directory that build prints")
	plugins       = flag.String("plugins", "", "the directory of plugin-scripted and plugin-generic")
	oldContainerd = flag.Bool("containerd-1", false, "containerd is older than 2.0")
	shield        = flag.String("shield", "", "a devlet: run the scenarios with its shield too")
	pattern       = flag.String("run", "", "run only scenarios whose names (bare/NAME, shield/NAME) match this regular expression")
	list          = flag.Bool("list", false, "print the names of the scenarios")
	rounds        = flag.Int("rounds", 1, "number of simulated reboots")
	hang          = flag.Duration("hang", 10*time.Second, "time for which a plugin hangs in the comparison")
	duration      = flag.Duration("duration", 30*time.Second, "length of the run of random faults")
	seed          = flag.Uint64("seed", 1, "seed of the random faults")
	printTable    = flag.Bool("table", false, "print what was measured as a Markdown table, bare node and shield side by side")
	keep          = flag.Bool("keep", false, "keep all files of the run")
	verbosity     = flag.String("verbosity", "2", "that of the kubelet's log")
)

var (
	results node.Results
	table   measurements
)

func main() {
	flag.Parse()
	names := regexp.MustCompile(*pattern)
	chosen := map[bool][]scenario{}
	for _, shielded := range []bool{false, true} {
		for _, s := range scenarios {
			if !(s.bare && !shielded || s.shield && shielded && (*shield != "" || *list)) {
				continue
			}
			if s.moves && *shield == "" && !*list {
				continue
			}
			if !names.MatchString(s.title(shielded)) || s.slow && *pattern == "" {
				continue
			}
			if *list {
				fmt.Println(s.title(shielded))
			}
			chosen[shielded] = append(chosen[shielded], s)
		}
	}
	if *list {
		return
	}
	if err := network(); err != nil {
		panic(err)
	}
	dir := filepath.Join(*work, "cluster")
	if err := os.Mkdir(dir, 0o755); err != nil {
		panic(err)
	}
	c, err := cluster.Start(*controlPlane, dir)
	if err != nil {
		panic(err)
	}
	for _, shielded := range []bool{false, true} {
		if len(chosen[shielded]) == 0 {
			continue
		}
		name := scenario{}.title(shielded)
		m, err := newMachine(filepath.Join(*work, strings.TrimSuffix(name, "/")), c, shielded)
		if err == nil {
			started := time.Now()
			err = m.start()
			fmt.Printf("%sthe node is ready after %s\n", name, seconds(time.Since(started)))
		}
		if results.Check(name+"the node starts", err) {
			for _, s := range chosen[shielded] {
				s.execute(m)
			}
		}
		if m != nil {
			m.stop()
		}
	}
	c.Stop()
	if results.Failed() > 0 || *keep {
		os.WriteFile(filepath.Join(*work, "keep"), nil, 0o600)
	}
	if *printTable {
		fmt.Print(table.markdown())
	}
	results.End()
}

// network sets up the network namespace of the harness: loopback, and an
// address for the node, because the kubelet refuses one of loopback.
func network() error {
	links, err := net.Interfaces()
	if err != nil {
		return err
	}
	if len(links) != 1 {
		return fmt.Errorf("%d network interfaces: start drive with run", len(links))
	}
	const address = "192.0.2.1"
	for _, line := range []string{
		"link set lo up", "link add kubelet0 type veth peer name kubelet1", "address add " + address + "/24 dev kubelet0",
		"link set kubelet0 up", "link set kubelet1 up",
	} {
		if out, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", line, err, out)
		}
	}
	// The kubelet looks up its name, and there is no DNS.
	hosts := filepath.Join(*work, "hosts")
	names := "127.0.0.1 localhost\n" + address + " " + nodeName + "\n"
	if err := os.WriteFile(hosts, []byte(names), 0o644); err != nil {
		return err
	}
	return syscall.Mount(hosts, "/etc/hosts", "", syscall.MS_BIND, "")
}

// empty deletes all pods, and waits until their containers have ended.
func (m *machine) empty() error {
	if err := m.cluster.Admin.AwaitList(podsPath, url.Values{}, soon, func(pods []Object) error {
		for _, pod := range pods {
			m.cluster.Admin.Delete(podPath(pod.Name()), 0)
		}
		if len(pods) > 0 {
			return fmt.Errorf("%d pods exist", len(pods))
		}
		return nil
	}); err != nil {
		return err
	}
	return noContainers()
}

// noContainers waits until all containers have ended, those of sandboxes included.
func noContainers() error {
	return node.Until(soon, func() error {
		for _, p := range processes() {
			if p.container != "" {
				return fmt.Errorf("a container of pod %s runs: %s", p.pod, p.name)
			}
		}
		return nil
	})
}
