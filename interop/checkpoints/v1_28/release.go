package main

const release = "v1.28.15"

var extra = map[string]func([]string) error{"samples": writeSamples}
