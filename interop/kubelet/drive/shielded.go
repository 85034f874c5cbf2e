package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"devlet.test/interop/kubernetes/cluster"
	"devlet.test/interop/node"
)

// shielded run only with the shield.
var shielded = []scenario{
	{name: "containers", run: containers, shield: true},
	{name: "refusing", run: refusing, shield: true},
	{name: "hanging", run: hanging, shield: true},
	{name: "killed-mid-call", run: killedMidCall, shield: true},
	{name: "upgrade", run: upgrade, shield: true},
	{name: "upgrade-ids", run: upgradeIDs, shield: true},
	{name: "restart-each", run: restartEach, bare: true, shield: true},
	{name: "restart-orders", run: restartOrders, shield: true, slow: true},
	{name: "fifty", run: fifty, shield: true},
	{name: "registration", run: registration, shield: true},
	{name: "devlet-restart", run: devletRestart, shield: true},
	{name: "third-party", run: thirdParty, shield: true},
	{name: "registered-twice", run: registeredTwice, shield: true},
	{name: "devlet-away", run: devletAway, shield: true},
	{name: "without-cdi", run: withoutCDI, shield: true},
}

// containers: init containers, a sidecar, two containers, and several resources in one container.
func containers(t *T) {
	t.plugin("first", 6)
	t.plugin("second", 4)
	t.create(pod{
		name: "many", wants: map[string]int{"first": 2, "second": 1},
		init:       []container{{"prepare", map[string]int{"first": 2}}},
		sidecars:   []container{{"sidecar", map[string]int{"second": 1}}},
		containers: []container{{"beside", map[string]int{"first": 1, "second": 1}}},
	})
	main, err := t.holding("many", soon, "sidecar", "beside", "main")
	t.Must("all containers hold their devices", err)
	t.Check("no device is open twice", none(violations()))

	t.ok(killContainer(main))
	again, err := t.restarted(main)
	if err == nil {
		err = equal("devices", again.open, main.open)
	}
	t.Check("a killed container gets the same devices", err)
	t.remove("many", 0)
	t.create(pod{name: "all", wants: map[string]int{"first": 6, "second": 4}})
	_, err = t.holding("all", soon)
	t.Check("all devices are free after the pod", err)
}

// faulty are the calls of a plugin that a fault can hit, and whether they come only when the plugin registers.
var faulty = []struct {
	call         string
	registration bool
}{
	{"Allocate", false}, {"PreStartContainer", false}, {"GetPreferredAllocation", false},
	{"GetDevicePluginOptions", true}, {"ListAndWatch", true},
}

// refusing: the plugin answers each call with an error, and later it does not.
func refusing(t *T) { eachFault(t, "refuse") }

// hanging: the plugin does not answer a call, and later it does.
func hanging(t *T) { eachFault(t, "hang") }

func eachFault(t *T, fault string) {
	for _, f := range faulty {
		kind := fault + "-" + strings.ToLower(f.call)
		p := t.plugin(kind, 2, "--prestart", "--preferred")
		if f.registration {
			p.Kill()
			p.script(f.call + " " + fault)
			t.ok(p.Start())
		}
		p.script(f.call + " " + fault)
		t.create(pod{name: kind, wants: map[string]int{kind: 1}})
		what := fmt.Sprintf("%s (%s): ", f.call, fault)
		// A call that is not necessary holds up no pod.
		needed := f.call == "Allocate" || f.call == "PreStartContainer"
		if needed {
			t.Check(what+"the container waits", t.waiting(kind, "CreateContainerConfigError", soon))
			message, err := t.event(kind, p.resource)
			t.Check(what+"an event names the resource", err)
			if fault == "refuse" {
				t.Check(what+"the event has the plugin's error", contains(message, "the plugin refuses "+f.call))
			}
		}
		started := time.Now()
		t.create(pod{name: kind + "-other"})
		_, err := t.ready(kind+"-other", soon)
		if waited := time.Since(started); waited > 15*time.Second {
			err = errors.Join(err, fmt.Errorf("it waited %v", waited))
		}
		t.Check(what+"another pod does not wait", err)
		p.script()
		_, err = t.holding(kind, soon)
		t.Check(what+"the pod starts afterwards", err)
		p.Kill()
	}
}

// killedMidCall: the plugin dies in a call.
func killedMidCall(t *T) {
	for _, call := range []string{"Allocate", "PreStartContainer"} {
		kind := "die-" + strings.ToLower(call)
		p := t.plugin(kind, 2, "--prestart")
		p.script(call + " die")
		t.create(pod{name: kind, wants: map[string]int{kind: 1}})
		t.Must("the plugin dies in "+call, node.Until(soon, func() error {
			if p.Running() == nil {
				return errors.New("it runs")
			}
			return nil
		}))
		t.Check("the container waits", t.waiting(kind, "CreateContainerConfigError", soon))
		p.script()
		t.ok(p.Start())
		_, err := t.holding(kind, soon)
		t.Check("the pod starts with the next plugin", err)
	}
}

// upgrade: the next version of a plugin starts before the last one ends.
func upgrade(t *T) {
	p := t.plugin("upgrade", 2)
	t.create(pod{name: "old", wants: map[string]int{"upgrade": 1}})
	old, err := t.holding("old", soon)
	t.Must("a pod has a device of the old version", err)
	next := p.process("v2")
	t.ok(next.Start())
	t.cleanup(next.Kill)
	// The last plugin to register serves the resource.
	t.Must("the new version is registered", p.versioned("ListAndWatch", "v2", 1))
	t.ok(p.Stop())
	t.create(pod{name: "new", wants: map[string]int{"upgrade": 1}})
	fresh, err := t.holding("new", soon)
	t.Must("a pod has the other device", err)
	t.Check("the new version serves it", equal("version", fresh.env["UPGRADE_VERSION"], "v2"))
	t.Check("the first pod runs on", same(t, "old", old))
	t.Check("no device is open twice", none(violations()))
}

// upgradeIDs: the next version of a plugin names its devices otherwise.
func upgradeIDs(t *T) {
	p := t.plugin("upgrade-ids", 2)
	t.create(pod{name: "old", wants: map[string]int{"upgrade-ids": 1}})
	old, err := t.holding("old", soon)
	t.Must("a pod has a device of the old version", err)
	p.Kill()
	p.flags = append(p.flags, "--first=7")
	next := p.process("v2")
	t.ok(next.Start())
	t.cleanup(next.Kill)
	t.Must("the new version is registered", p.versioned("ListAndWatch", "v2", 1))
	t.Must("its devices are offered", p.offered(2))
	t.create(pod{name: "new", wants: map[string]int{"upgrade-ids": 2}})
	fresh, err := t.holding("new", soon)
	t.Must("a pod has the new devices", err)
	t.Check("they have the new names", equal("devices", fresh.open, []string{"upgrade-ids-7", "upgrade-ids-8"}))
	t.Check("the first pod runs on", same(t, "old", old))
	t.Check("no device is open twice", none(violations()))
}

// versioned waits until a version of the plugin has received a number of calls.
func (p *plugin) versioned(name, version string, count int) error {
	return node.Until(soon, func() error {
		got := 0
		for _, c := range p.calls(name) {
			if c.Version == version {
				got++
			}
		}
		if got < count {
			return fmt.Errorf("%s received %s %d times, not %d", version, name, got, count)
		}
		return nil
	})
}

// same returns an error unless a pod's container is still the same one with the same devices.
func same(t *T, name string, before instance) error {
	now, err := t.holding(name, 0)
	return errors.Join(err, equal("container", now.container, before.container), equal("devices", now.open, before.open))
}

// part is a process of the node that can be killed and started again.
type part struct {
	name    string
	process *cluster.Process
}

func parts(m *machine, p *plugin) []part {
	all := []part{{"kubelet", m.kubelet}, {"containerd", m.containerd}, {"plugin", p.Process}}
	if m.shield {
		all = append(all, part{"devlet", m.devlet})
	}
	return all
}

// settle waits for a condition, and starts parts again that end, as their services would be.
func settle(all []part, condition func() error) error {
	return node.Until(late, func() error {
		for _, part := range all {
			if part.process.Running() != nil {
				if err := part.process.Start(); err != nil {
					return err
				}
			}
		}
		return condition()
	})
}

// restartEach kills and restarts each part alone.
func restartEach(t *T) {
	p := t.plugin("restart-each", 12)
	t.create(pod{name: "lasting", wants: map[string]int{"restart-each": 1}})
	lasting, err := t.holding("lasting", soon)
	t.Must("a pod has a device", err)
	for _, part := range parts(t.m, p) {
		part.process.Kill()
		t.Check(part.name+" is killed: the pod runs on", same(t, "lasting", lasting))
		before := t.m.registrations(p.resource)
		t.ok(part.process.Start())
		if part.name == "kubelet" || part.name == "devlet" || part.name == "plugin" && !t.m.shield {
			t.Must(part.name+" is back: the resource is registered", node.Until(soon, func() error {
				if now := t.m.registrations(p.resource); len(now) <= len(before) {
					return fmt.Errorf("it was registered %d times, and then %d", len(before), len(now))
				}
				return nil
			}))
		}
		t.Must(part.name+" is back: the node is ready", t.m.ready())
		t.Must(part.name+" is back: the devices are offered", p.offered(p.devices))
		name := "after-" + part.name
		t.create(pod{name: name, wants: map[string]int{p.kind: 1}})
		_, err := t.holding(name, soon)
		t.Check(part.name+" is back: a new pod gets a device", err)
		t.Check(part.name+" is back: the pod runs on", same(t, "lasting", lasting))
	}
	t.Check("no device is open twice", none(violations()))
}

// restartOrders kills all parts, in each order, and starts them in each order, while a pod runs and another one is bound.
func restartOrders(t *T) {
	// One for each pod: a kubelet that restarts knows the pods of its checkpoint until its first admission is over.
	p := t.plugin("restart-orders", 32)
	t.create(pod{name: "lasting", wants: map[string]int{"restart-orders": 1}})
	lasting, err := t.holding("lasting", soon)
	t.Must("a pod has a device", err)
	for _, order := range permutations(4) {
		all := parts(t.m, p)
		var names []string
		for _, i := range order {
			all[i].process.Kill()
			names = append(names, all[i].name)
		}
		what := strings.Join(names, ", ")
		t.create(pod{name: "bound", wants: map[string]int{"restart-orders": 1}})
		var started []part
		for _, i := range order {
			t.ok(all[i].process.Start())
			started = append(started, all[i])
			settle(started, func() error { return nil })
		}
		late := slices.Index(names, "devlet") > slices.Index(names, "kubelet")
		rejected := false
		err := settle(all, func() error {
			_, err := held(instances(), "bound", "main")
			if err == nil {
				return nil
			}
			o, failed := t.m.cluster.Admin.Get(podPath("bound"))
			if failed != nil {
				return failed
			}
			if rejected = late && o.Text("status", "reason") == unexpected; rejected {
				return nil
			}
			return fmt.Errorf("%w: %s", err, describe(o))
		})
		if rejected {
			// The kubelet was faster than devlet, which must be started first.
			fmt.Println(t.name + ": " + what + ": the pod was rejected")
		}
		t.Check(what+": a pod that was bound meanwhile gets a device, or is rejected if devlet came late", err)
		t.Check(what+": the pod runs on", errors.Join(same(t, "lasting", lasting), none(violations())))
		t.remove("bound", 0)
		t.ok(idleExcept("restart-orders", "lasting"))
	}
}

func permutations(n int) [][]int {
	if n == 0 {
		return [][]int{nil}
	}
	var all [][]int
	for _, shorter := range permutations(n - 1) {
		for i := range n {
			all = append(all, slices.Insert(slices.Clone(shorter), i, n-1))
		}
	}
	return all
}

// fifty creates 50 pods at once.
func fifty(t *T) {
	const pods = 50
	t.plugin("fifty", pods)
	started := time.Now()
	for i := range pods {
		t.create(pod{name: fmt.Sprintf("fifty-%d", i), wants: map[string]int{"fifty": 1}, scheduled: true})
	}
	var failed error
	for i := range pods {
		_, err := t.holding(fmt.Sprintf("fifty-%d", i), late)
		failed = errors.Join(failed, err)
	}
	t.Check("all pods hold a device", failed)
	t.Check("no device is open twice", none(violations()))
	fmt.Printf("%s: all pods run after %s\n", t.name, seconds(time.Since(started)))
}

// thirdParty: unmodified plugins, which have the directory that they register in mounted over the kubelet's.
func thirdParty(t *T) {
	files := filepath.Join(t.m.dir, "files", "generic")
	t.ok(os.MkdirAll(files, 0o755))
	var groups []string
	for i := range 2 {
		path := fmt.Sprintf("%s/generic-%d", files, i)
		if err := syscall.Mknod(path, syscall.S_IFCHR|0o666, 1<<8|3); err != nil && err != syscall.EEXIST {
			t.ok(err)
		}
		groups = append(groups, fmt.Sprintf(`{"paths":[{"path":%q,"mountPath":"/dev/generic-%d"}]}`, path, i))
	}
	generic := t.thirdParty("plugin-generic", "--domain", strings.TrimSuffix(domain, "/"), "--listen", "127.0.0.1:0",
		"--device", `{"name":"generic","groups":[`+strings.Join(groups, ",")+`]}`)
	t.Must("generic-device-plugin is registered", errors.Join(t.m.offered(domain+"generic", 2), generic.Running()))
	sample := t.thirdParty("plugin-sample")
	t.Must("sample-device-plugin is registered", errors.Join(t.m.offered(domain+"resource", 2), sample.Running()))

	t.create(pod{name: "generic", wants: map[string]int{"generic": 1}, scheduled: true})
	generic0, err := t.holding("generic", soon)
	t.Check("a pod holds a device of generic-device-plugin", err)
	// This plugin gives a file of the host.
	object := pod{name: "sample"}.object()
	main := object["spec"].(Object)["containers"].([]Object)[0]
	main["resources"] = Object{"limits": Object{domain + "resource": "1"}}
	main["command"] = []string{"sh", "-c", "for file in /tmp/Dev-*; do exec 3<$file; done; exec sleep 1000000"}
	_, err = t.m.cluster.Admin.Create(podsPath, object)
	t.ok(err)
	held, err := t.holding("sample", soon)
	if err == nil {
		target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/3", held.pid))
		err = contains(target, "/tmp/Dev-")
	}
	t.Check("a pod holds a device of sample-device-plugin", err)

	generic.Kill()
	t.create(pod{name: "waiting", wants: map[string]int{"generic": 1}})
	t.Check("generic-device-plugin is away: the container waits", t.waiting("waiting", "CreateContainerConfigError", soon))
	t.ok(generic.Start())
	_, err = t.holding("waiting", soon)
	t.Check("it is back: the pod starts", errors.Join(err, same(t, "generic", generic0)))
	t.Check("no device is open twice", none(violations()))
}

// thirdParty starts a plugin that knows no directory but the kubelet's.
func (t *T) thirdParty(program string, args ...string) *cluster.Process {
	command := append([]string{"--mount", "sh", "-c", `mount --bind "$0" /var/lib/kubelet/device-plugins && exec "$@"`,
		t.m.pluginDir(), filepath.Join(*plugins, program)}, args...)
	p := cluster.NewProcess(filepath.Join(t.m.dir, "logs"), "/usr/bin/unshare", command...)
	p.Log = filepath.Join(t.m.dir, "logs", program+".log")
	t.ok(p.Start())
	t.cleanup(p.Kill)
	return p
}

// registeredTwice: a plugin registers with the kubelet too, and gives a device beside devlet.
func registeredTwice(t *T) {
	p := t.plugin("twice", 2)
	other := *p
	other.flags = []string{"--dir=" + filepath.Join(kubeletDir, "device-plugins")}
	direct := other.process("direct")
	t.cleanup(direct.Kill)
	t.ok(direct.Start())
	t.Must("the plugin registers with the kubelet too", p.versioned("ListAndWatch", "direct", 1))
	t.create(pod{name: "twice", wants: map[string]int{"twice": 1}})
	_, err := t.holding("twice", soon)
	t.Must("a pod gets a device of the plugin itself", err)
	t.Check("status names the problem", node.Until(soon, func() error {
		out, err := t.m.ask("status")
		if err != nil && out == "" {
			return err
		}
		return contains(out, "beside devlet")
	}))
	t.Check("no device is open twice", none(violations()))
}

// devletAway: without devlet, the node is one whose plugins are away.
func devletAway(t *T) {
	p := t.plugin("devlet-away", 3)
	t.create(pod{name: "lasting", wants: map[string]int{"devlet-away": 1}})
	lasting, err := t.holding("lasting", soon)
	t.Must("a pod has a device", err)
	t.m.devlet.Kill()
	t.Must("the devices are gone with devlet", p.offered(0))
	t.create(pod{name: "bound", wants: map[string]int{"devlet-away": 1}})
	_, err = t.rejected("bound", unexpected, soon)
	t.Check("a pod that is bound now is failed, as with a bare kubelet", err)
	t.ok(t.m.startDevlet())
	t.Check("devlet is back: the devices are offered", p.offered(3))
	t.Check("the first pod runs on", same(t, "lasting", lasting))
	t.create(pod{name: "later", wants: map[string]int{"devlet-away": 1}})
	_, err = t.holding("later", soon)
	t.Check("a new pod gets a device", errors.Join(err, none(violations())))
}

// withoutCDI: a runtime that ignores devlet's CDI specs would start containers without their devices, or none.
func withoutCDI(t *T) {
	t.plugin("without-cdi", 1)
	_, err := t.m.ask("shield", "check")
	t.Check("check accepts the node", err)
	t.m.devlet.Kill()
	t.m.containerd.Kill()
	t.ok(t.m.writeContainerdConfig(false))
	t.cleanup(func() {
		t.m.containerd.Kill()
		t.ok(t.m.writeContainerdConfig(true))
		t.ok(t.m.startContainerd())
		t.m.devlet.Kill()
		t.ok(t.m.startDevlet())
	})
	t.ok(t.m.startContainerd())
	t.ok(t.m.devlet.Start())
	out, err := t.m.ask("shield", "check")
	if err == nil {
		err = fmt.Errorf("it accepts the node: %s", out)
	} else {
		err = contains(strings.ToLower(out), "cdi")
	}
	t.Check("check refuses the runtime", err)
	t.create(pod{name: "without-cdi", wants: map[string]int{"without-cdi": 1}})
	t.Check("the container does not start without its device", node.Until(soon, func() error {
		o, err := t.m.cluster.Admin.Get(podPath("without-cdi"))
		if err != nil {
			return err
		}
		text := describe(o)
		if !strings.Contains(text, unexpected) && !strings.Contains(text, "unresolvable CDI devices") {
			return errors.New(text)
		}
		return none(violations())
	}))
}
