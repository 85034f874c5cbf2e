package main

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"devlet.test/interop/node"
)

// crashes kills devlet at random.
var crashes = []scenario{
	{name: "killed-at-random", run: killedAtRandom},
}

// rounds is the number of kills; $DEVLET_KUBERNETES_ROUNDS replaces it.
func rounds() int {
	if count, err := strconv.Atoi(os.Getenv("DEVLET_KUBERNETES_ROUNDS")); err == nil {
		return count
	}
	return 20
}

// killedAtRandom creates and deletes pods while devlet is killed and started again. After each round, the API server, devlet
// and the driver agree.
func killedAtRandom(t *T) {
	const devices = 4
	seed := uint64(time.Now().UnixNano())
	if given, err := strconv.ParseUint(os.Getenv("SEED"), 10, 64); err == nil {
		seed = given
	}
	random := rand.New(rand.NewPCG(seed, 0))
	driver, resource := t.name+".example.com", "example.com/"+t.name
	h := t.host()
	t.class(driver, "")
	t.template("one", driver, 1)
	h.serve()
	h.exampleDriver(driver, devices)
	plugin := h.plugin(resource, devices)
	t.Must("the driver publishes its devices", h.awaitSlices(driver, devices, soon))
	t.Must("the plugin's devices are published", h.counts(resource, "4", "4"))

	change := func(count int) {
		for range count {
			t.change(h, random, resource, devices)
			time.Sleep(time.Duration(random.IntN(50)) * time.Millisecond)
		}
	}
	for round := range rounds() {
		delay := time.Duration(random.IntN(400)) * time.Millisecond
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			time.Sleep(delay)
			h.Kill()
		}()
		change(1 + random.IntN(8))
		<-ended
		change(random.IntN(4))
		err := h.restart()
		if err == nil {
			err = plugin.command("register")
		}
		if err == nil {
			err = node.Until(late, func() error { return t.agree(h) })
		}
		if err == nil {
			err = h.counts(resource, "4", "4")
		}
		t.Must(fmt.Sprintf("round %d: API server, devlet and driver agree", round+1),
			wrap(err, "SEED=%d, killed after %v", seed, delay))
	}
}

// change creates a pod of one kind, or deletes one: there are at most as many as devices.
func (t *T) change(h *host, random *rand.Rand, resource string, devices int) {
	kind := []string{"claims", "plugin"}[random.IntN(2)]
	pods, _, err := t.Admin.List(t.path("pods"), nil)
	t.ok(err)
	pods = slices.DeleteFunc(pods, func(p Object) bool { return !strings.HasPrefix(p.Name(), kind) })
	if len(pods) == devices || len(pods) > 0 && random.IntN(3) == 0 {
		t.ok(t.Admin.Delete(t.path("pods", pods[random.IntN(len(pods))].Name()), 0))
		return
	}
	created := pod{name: fmt.Sprintf("%s-%d", kind, random.IntN(1_000_000)), host: h}
	if kind == "claims" {
		created.template = "one"
	} else {
		created.limits = Object{resource: "1"}
	}
	t.create(created)
}

// agree compares the pods in the API, those of devlet, and the claims that the driver has prepared.
func (t *T) agree(h *host) error {
	list, _, err := t.Admin.List(t.path("pods"), nil)
	if err != nil {
		return err
	}
	existing, claims := map[string]bool{}, map[string]bool{}
	for _, p := range list {
		if p.Text("spec", "nodeName") == "" {
			return fmt.Errorf("%s is not scheduled: %v", p.Name(), p.At("status", "conditions"))
		}
		existing[p.UID()] = true
		if name := t.claimOf(p); name != "" {
			claim, err := t.Admin.Get(t.path("resourceclaims", name))
			if err != nil {
				return err
			}
			claims[claim.UID()] = true
		}
	}
	pods, err := h.admitted()
	if err != nil {
		return err
	}
	admitted, used := map[string]bool{}, map[string]string{}
	for uid, p := range pods {
		if !p.holds() {
			return fmt.Errorf("%s is not prepared: %v", p.Name, p)
		}
		admitted[uid] = true
		for _, c := range p.Containers {
			for _, d := range c.Devices {
				for _, id := range d.IDs {
					if other := used[id]; other != "" {
						return fmt.Errorf("%s and %s have %s", other, p.Name, id)
					}
					used[id] = p.Name
				}
			}
		}
	}
	prepared, err := h.claimsOfSpecs()
	if err != nil {
		return err
	}
	return errors.Join(same("admitted pods", admitted, existing), same("prepared claims", prepared, claims))
}

// claimsOfSpecs returns the UIDs of claims that dra-example-driver has prepared: it writes a CDI spec for each.
func (h *host) claimsOfSpecs() (map[string]bool, error) {
	specs, err := filepath.Glob(filepath.Join(h.cdi(), "*"))
	claims := map[string]bool{}
	for _, spec := range specs {
		name := strings.TrimSuffix(filepath.Base(spec), filepath.Ext(spec))
		// A UID has 36 characters.
		if uid := name[max(0, len(name)-36):]; strings.Count(uid, "-") == 4 && !strings.HasSuffix(name, "common") {
			claims[uid] = true
		}
	}
	return claims, err
}

// same returns an error with the differences of two sets.
func same(what string, got, want map[string]bool) error {
	if maps.Equal(got, want) {
		return nil
	}
	return fmt.Errorf("%s: %v, not %v", what, slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
}

// wrap adds a text to an error.
func wrap(err error, format string, values ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(values, err)...)
}
