{{/* What a service selects pods by: never changes during a release's life. */}}
{{- define "seqserve.selector" -}}
app.kubernetes.io/name: seqserve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "seqserve.labels" -}}
{{ include "seqserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{/* Of every container: the image's user, nothing to write to, nothing to gain. */}}
{{- define "seqserve.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* A setting as the text of a variable. Helm reads numbers as floats, which would print 4194304 as 4.194304e+06. */}}
{{- define "seqserve.text" -}}
{{ kindIs "string" . | ternary . (toJson .) }}
{{- end }}
