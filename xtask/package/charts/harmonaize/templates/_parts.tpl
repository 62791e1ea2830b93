{{- define "harmonaize.selector" -}}
app.kubernetes.io/name: harmonaize
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "harmonaize.labels" -}}
{{ include "harmonaize.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | replace "+" "_" | trunc 63 | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
{{- end }}

{{- define "harmonaize.image" -}}
{{ .root.Values.image.registry }}/{{ .name }}:{{ .root.Values.image.tag | default (.root.Chart.AppVersion | replace "+" "_") }}
{{- end }}

{{- /* Keys of a configuration: what JSON writes of a number, a string, a truth value and a list of these is TOML too. */ -}}
{{- define "harmonaize.keys" -}}
{{- range $key, $value := . }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}

{{- /* Where agents find the controls: each by the name of its pod, for one of them leads. */ -}}
{{- define "harmonaize.controls" -}}
{{- $all := .Values.controlAddresses -}}
{{- if not $all -}}
{{- range $i := until (int .Values.control.replicas) -}}
{{- $all = append $all (printf "%s-control-%d.%s-control.%s.svc:7000" $.Release.Name $i $.Release.Name $.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{ toJson $all }}
{{- end }}

{{- /* What every pod has. */ -}}
{{- define "harmonaize.pod" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: 15
{{- end }}

{{- /* Who runs what needs no privilege: the user of the images. */ -}}
{{- define "harmonaize.unprivileged" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- /* A sign of life of a daemon on the network of its node: its metrics. */ -}}
{{- define "harmonaize.alive" -}}
livenessProbe:
  httpGet:
    host: 127.0.0.1
    port: {{ . }}
    path: /metrics
  periodSeconds: 10
  failureThreshold: 3
{{- end }}
