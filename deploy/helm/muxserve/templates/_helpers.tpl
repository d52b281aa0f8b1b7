{{- define "muxserve.name" -}}
{{- printf "%s" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "muxserve.selector" -}}
app.kubernetes.io/name: muxserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* The pods that answer behind the release's service: its own, or those of all releases of its group. */}}
{{- define "muxserve.endpoints" -}}
{{- if .Values.group -}}
app.kubernetes.io/name: muxserve
app.kubernetes.io/part-of: {{ .Values.group }}
{{- else -}}
{{ include "muxserve.selector" . }}
{{- end -}}
{{- end -}}

{{/* The fleet file: what it keeps lies in the data volume unless it says where. */}}
{{- define "muxserve.fleet" -}}
{{- $fleet := deepCopy .Values.fleet -}}
{{- $gateway := get $fleet "gateway" | default dict -}}
{{- if not (hasKey $gateway "usage_file") }}{{ $_ := set $gateway "usage_file" "/data/usage.sqlite" }}{{ end -}}
{{- range $key, $name := dict "responses" "responses.sqlite" "batches" "batches" -}}
{{- if has (get $gateway $key | toString) (list "true" "on") }}{{ $_ := set $gateway $key (printf "/data/%s" $name) }}{{ end -}}
{{- end -}}
{{- $_ := set $fleet "gateway" $gateway -}}
{{ toYaml $fleet }}
{{- end -}}

{{- define "muxserve.labels" -}}
{{ include "muxserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.group }}
app.kubernetes.io/part-of: {{ . }}
{{- end }}
{{- end -}}
