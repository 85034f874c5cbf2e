package main

import (
	"fmt"
	"strings"
)

// measurements are the rows of the table, in the order in which they were first measured.
type measurements struct{ rows []row }

type row struct{ name, bare, shield string }

func (m *measurements) set(name string, shielded bool, text string) {
	i := 0
	for i < len(m.rows) && m.rows[i].name != name {
		i++
	}
	if i == len(m.rows) {
		m.rows = append(m.rows, row{name: name})
	}
	if shielded {
		m.rows[i].shield = text
	} else {
		m.rows[i].bare = text
	}
}

func (m *measurements) markdown() string {
	var text strings.Builder
	text.WriteString("\n| | bare kubelet | with the shield |\n|---|---|---|\n")
	for _, r := range m.rows {
		fmt.Fprintf(&text, "| %s | %s | %s |\n", r.name, r.bare, r.shield)
	}
	return text.String()
}
