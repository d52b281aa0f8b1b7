{{- define "muxserve.name" -}}
{{- printf "%s" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "muxserve.selector" -}}
app.kubernetes.io/name: muxserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "muxserve.labels" -}}
{{ include "muxserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}
